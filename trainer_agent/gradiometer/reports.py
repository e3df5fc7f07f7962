"""What the training thread hands to the agent's thread: values still on their way, and things that happened.

A report knows how to write itself into `Records`; that runs on the agent's thread, where waiting for a device is
allowed. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from gradiometer import values, wire
from gradiometer.plain import text_of
from gradiometer.records import MAX_SCALAR_SCHEMAS, Records

if TYPE_CHECKING:
    from gradiometer.capture.forward import ForwardReport
    from gradiometer.capture.gradients import Partials
    from gradiometer.capture.histograms import Histogram
    from gradiometer.capture.readback import Readback

SEVERITIES: Final = ("info", "warning", "error", "critical")
_FLOATS: Final = frozenset({float})
_TEXTS: Final = frozenset({str})


class Report(Protocol):
    """Something for the agent's thread to write."""

    @property
    def step(self) -> int | None:
        """The step it belongs to, for the count of what was dropped."""
        ...

    def write(self, records: Records) -> None:
        """Append to `records`. Agent thread only: may wait for the device."""
        ...


# A `Struct` is made in a tenth of the time of a frozen dataclass, and every `log` makes two of them.
class Scalars(msgspec.Struct, frozen=True, kw_only=True):
    """Named numbers, some of them still on a device.

    Attributes:
        columns: names and how ranks combine.
        numbers: one per column; where a readback will fill in, anything.
        pending: column indices and the readback with as many values.
    """

    columns: tuple[wire.Column, ...]
    numbers: tuple[float, ...]
    pending: tuple[tuple[tuple[int, ...], Readback], ...] = ()

    def found(self) -> list[tuple[wire.Column, Any]]:
        """Columns and numbers, where none is pending."""
        return list(zip(self.columns, self.numbers, strict=True))

    def row(self) -> list[float]:
        """All values; agent thread only."""
        row = list(self.numbers)
        for indices, readback in self.pending:
            for index, value in zip(indices, readback.values().ravel(), strict=True):
                row[index] = float(value)
        return row


class ScalarReport(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one step: what the user logged, or what belongs to the step's end."""

    step: int
    time: float
    scalars: Scalars

    def write(self, records: Records) -> None:
        """See `Report`."""
        row = self.scalars.row() if self.scalars.pending else self.scalars.numbers
        records.add_scalars(self.step, self.time, self.scalars.columns, row)
        records.ring.see_scalars(self.step, self.scalars.columns, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Everything that was captured for one optimizer step of one watch.

    Attributes:
        scale: the loss scale that the gradients were still multiplied by; None: they were not.
        skip: not zero if the step was skipped; None where there is no scaler.
        scalars: of the step's end; None for a watch that is not the clock.
        reads_rss: add the process's own memory, read on the agent's thread.
    """

    step: int
    time: float
    partials: Partials | None
    scale: Readback | None
    skip: Readback | None
    forward: ForwardReport | None
    scalars: Scalars | None
    reads_rss: bool

    def write(self, records: Records) -> None:
        """See `Report`. The event comes before the numbers, so that an alert about them can name the module."""
        modules = self.forward.nonfinite_modules() if self.forward is not None else []
        if modules:
            event = wire.Event(
                kind="nonfinite_activation", time=self.time, step=self.step, attributes={"modules": modules}
            )
            records.add_event(event)
        if self.partials is not None and self.partials.layout.layers:
            self._write_layers(self.partials, records)
        if self.scalars is not None:
            self._write_scalars(self.scalars, records)
        skipped = self.skip is not None and bool(self.skip.values().ravel()[0] != 0.0)
        records.ring.end_step(self.step, skipped=skipped, modules=modules)

    def _write_layers(self, partials: Partials, records: Records) -> None:
        from gradiometer.capture import statistics

        table = partials.table()
        if self.scale is not None:
            table = statistics.unscale(table, float(self.scale.values().ravel()[0]), partials.statistics)
        values, layers = table.astype("<f8").tobytes(), partials.layout.layers
        schema_id = records.add_layers(self.step, self.time, layers, values, partials.statistics)
        if partials.histogram is not None:
            self._write_histogram(partials.histogram, len(layers), schema_id, records)

    def _write_histogram(
        self, histogram: Histogram, num_layers: int, schema_id: int, records: Records
    ) -> None:
        from gradiometer.capture import histograms

        try:
            values = histograms.packed(histogram.counts(num_layers, self.scale))
        except histograms.NotCountable as reason:
            attributes = {"metric": "histogram", "reason": str(reason)}
            records.add_event(
                wire.Event(kind="unavailable", time=self.time, step=self.step, attributes=attributes)
            )
            return
        wish = histogram.wish
        records.add_histogram(self.step, self.time, schema_id, values, wish.reason, wish.about)

    def _write_scalars(self, scalars: Scalars, records: Records) -> None:
        columns, row = scalars.columns, scalars.row()
        if self.skip is not None:
            columns = (*columns, wire.Column("scaler/skipped", "max"))
            row.append(float(self.skip.values().ravel()[0] != 0.0))
        if self.reads_rss:
            from gradiometer.capture import memory

            rss_bytes = memory.process_rss_bytes()
            if rss_bytes is not None:
                columns = (*columns, wire.Column(memory.RSS_METRIC, "max"))
                row.append(rss_bytes)
        records.add_scalars(self.step, self.time, columns, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventReport:
    """Something that happened, in the same order as the numbers."""

    kind: wire.EventKind
    time: float
    step: int | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def write(self, records: Records) -> None:
        """See `Report`."""
        records.add_event(
            wire.Event(kind=self.kind, time=self.time, step=self.step, attributes=dict(self.attributes))
        )


def alert_attributes(title: object, text: object, severity: object) -> dict[str, str]:
    """Of an alert of the user's own; an unknown severity is taken as a warning."""
    known = severity if isinstance(severity, str) and severity in SEVERITIES else "warning"
    return {"title": text_of(title)[:200], "text": text_of(text)[:4000], "severity": known}


def is_valid_step(step: object) -> bool:
    """Whether `step` is an integer that the wire can carry."""
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= wire.MAX_STEP


def as_finite_or_none(value: float) -> float | None:
    """`value`, or None for NaN and infinities."""
    return value if math.isfinite(value) else None


class FlatLogs:
    """The short way for what is logged most: a flat dict of floats under names that came before."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], tuple[wire.Column, ...]] = {}

    # Hot path: training thread, once per `log`. Must not look at the values one by one in Python.
    def scalars(self, metrics: object) -> Scalars | None:
        """What `metrics` says; None: go the long way, which takes everything and counts what is wrong with it."""
        if type(metrics) is not dict:
            return None
        names, numbers = tuple(metrics), tuple(metrics.values())
        # Types first: 1 and True are equal to 1.0, and a member of a text enumeration to its text, but not their names.
        if not _FLOATS.issuperset(map(type, numbers)) or not _TEXTS.issuperset(map(type, names)):
            return None
        columns = self._known.get(names) or self._learn(names)
        # Unequal where another thread changes the dict at this moment.
        if not columns or len(columns) != len(numbers):
            return None
        return Scalars(columns=columns, numbers=numbers)

    def _learn(self, names: tuple[str, ...]) -> tuple[wire.Column, ...] | None:
        try:
            columns = tuple([values.column(name) for name in names])
        except values.BadValue:
            return None
        if len(self._known) < MAX_SCALAR_SCHEMAS:
            self._known[names] = columns
        return columns


def collected(found: list[tuple[wire.Column, Any]]) -> Scalars:
    """Numbers and one-element tensors of one call, without waiting for a device."""
    if _FLOATS.issuperset(type(number) for _, number in found):
        return Scalars(columns=tuple([c for c, _ in found]), numbers=tuple([n for _, n in found]))
    from gradiometer.capture import scalars

    return scalars.collect(found)
