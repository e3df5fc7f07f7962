"""All that is known of one run between its log and its series. Pure: records in, folded values out.

Any order of arrival of the ranks gives the same values in the end, and applying a record again does nothing. The
state can be rebuilt: `offsets` says from where a log has to be read again, `memory` holds the little that is not in
those records.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradiometer import wire
from gradiometer_server.domain.folded import Folded, FoldedEvent
from gradiometer_server.fold.attempt import AttemptFold, LayoutMaker

BLOCK_STEPS: Final = 16
"""From so many steps in one frame on, scalars are folded as one block rather than step by step."""
SILENCE_S: Final = 30.0
"""A rank that says nothing for so long holds nobody back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSource:
    """One writer, as the store knows it. `last_step`: its highest so far, -1: none.

    `closed`: it has ended and nothing of it is left in the log.
    """

    source_id: int
    ordinal: int
    rank: int
    world_size: int
    folded_seq: int = 0
    last_step: int = -1
    closed: bool = False


class AttemptMemory(msgspec.Struct, kw_only=True):
    """What an attempt must remember beside the records that are read again.

    `times`: of its last steps; taken from their series at a load, so not written with every flush.
    """

    times: dict[int, float] = {}
    released: dict[str, int] = {}
    declared: list[tuple[int, int, int]] = []


class FoldMemory(msgspec.Struct, kw_only=True):
    """Persisted with every flush. `applied`: by source, up to where rules and counters have seen the records."""

    applied: dict[int, int] = {}
    attempts: dict[int, AttemptMemory] = {}


@dataclass(slots=True, kw_only=True)
class _Source:
    """Progress of one source."""

    spec: FoldSource
    applied_seq: int
    schemas: dict[int, wire.ScalarSchema | wire.LayerSchema] = field(default_factory=dict)
    last_step: int = -1


class RunFold:
    """State of one run. Not thread-safe: one thread owns it."""

    def __init__(self, *, make_layout: LayoutMaker, silence_s: float = SILENCE_S) -> None:
        self._make_layout, self._silence_s = make_layout, silence_s
        self._sources: dict[int, _Source] = {}
        self._attempts: dict[int, AttemptFold] = {}
        self._known: dict[int, int] = {}

    def add_source(self, spec: FoldSource, now_s: float) -> None:
        """Make a source known; repeating it changes nothing."""
        if spec.source_id in self._sources:
            return
        self._sources[spec.source_id] = _Source(
            spec=spec, applied_seq=spec.folded_seq, last_step=spec.last_step
        )
        attempt = self._attempt(spec)
        attempt.mark.heard(spec.rank, now_s)
        if spec.closed:
            attempt.mark.close(spec.rank, now_s)

    def declare(
        self, source_id: int, record: wire.ScalarSchema | wire.LayerSchema, *, after_step: int = -1
    ) -> None:
        """Take in a schema that the source declared after its step `after_step`, or before the first one."""
        source = self._sources[source_id]
        source.schemas[record.schema_id] = record
        attempt = self._attempt(source.spec)
        if isinstance(record, wire.ScalarSchema):
            attempt.declare_scalars(source.spec.rank, record.columns)
        else:
            attempt.declare_layers(source.spec.rank, record, after_step=after_step)

    def knows(self, source_id: int) -> bool:
        """Whether `add_source` was called for it."""
        return source_id in self._sources

    def applied_seq(self, source_id: int) -> int:
        """Number of the last record taken in."""
        return self._sources[source_id].applied_seq

    def skip_to(self, source_id: int, seq: int) -> None:
        """Records up to `seq` were refused by the server: they count as taken in."""
        source = self._sources[source_id]
        source.applied_seq = max(source.applied_seq, seq)

    def apply(self, source_id: int, seq: int, record: wire.Record, now_s: float) -> list[Folded]:
        """Take in one record and return what can be shown; one that was applied before changes nothing."""
        source = self._sources[source_id]
        if seq <= source.applied_seq:
            return []
        source.applied_seq = seq
        if isinstance(record, wire.Event):
            return self._event(source, record, now_s)
        if isinstance(record, wire.Frame):
            return self._frame(source, seq, record, now_s)
        if isinstance(record, wire.Detail):
            # Of one rank alone, so there is nothing to merge; its owner stores it as it is.
            self._attempt(source.spec).mark.heard(source.spec.rank, now_s)
            return []
        # When it was declared is remembered; in a record that is read again, the source's last step is a later one.
        again = seq <= self._known.get(source_id, 0)
        self.declare(source_id, record, after_step=-1 if again else source.last_step)
        return []

    def tick(self, now_s: float) -> list[Folded]:
        """What has become ready because time has passed."""
        return [item for attempt in self._attempts.values() for item in attempt.show(now_s, all_lanes=True)]

    def _frame(self, source: _Source, seq: int, frame: wire.Frame, now_s: float) -> list[Folded]:
        """# Hot path: once per frame; loops over steps, never over values."""
        attempt, rank = self._attempt(source.spec), source.spec.rank
        schema = source.schemas.get(frame.schema_id)
        if schema is None:
            # Ingest refuses such a frame; one from an older log is passed over rather than blocking the run.
            return []
        values_SC = np.frombuffer(frame.values, dtype="<f8").reshape(len(frame.steps), -1)
        if attempt.mark.world_size == 1 and isinstance(schema, wire.ScalarSchema) and _is_block(frame):
            names = tuple(column.name for column in schema.columns)
            source.last_step = max(source.last_step, frame.steps[-1])
            attempt.mark.heard(rank, now_s, step=source.last_step)
            return attempt.block(names, frame.steps, frame.times, values_SC) + attempt.show(now_s)
        order = sorted(range(len(frame.steps)), key=frame.steps.__getitem__)
        # A frame is read again for some of its steps: what came of the others, too late or not, is stored.
        again = seq <= self._known.get(source.spec.source_id, 0)
        items: list[Folded] = []
        for at in order:
            step, time_s = frame.steps[at], frame.times[at]
            items += _put(attempt, rank, seq, step, time_s, schema, values_SC[at], again=again)
        source.last_step = max(source.last_step, frame.steps[order[-1]])
        attempt.mark.heard(rank, now_s, step=source.last_step)
        return items + attempt.show(now_s)

    def _event(self, source: _Source, event: wire.Event, now_s: float) -> list[Folded]:
        attempt, rank = self._attempt(source.spec), source.spec.rank
        attempt.mark.heard(rank, now_s)
        items: list[Folded] = []
        if event.kind == "exit":
            attempt.mark.close(rank, now_s)
            items = attempt.show(now_s, all_lanes=True)
        told = FoldedEvent(
            attempt=source.spec.ordinal,
            rank=rank,
            kind=event.kind,
            time_s=event.time,
            step=event.step,
            attributes=event.attributes,
        )
        return [*items, told]

    def take_times(self) -> dict[int, dict[int, float]]:
        """By attempt, the steps whose time is new or has changed since the last call."""
        changed = {ordinal: attempt.times.take_changed() for ordinal, attempt in self._attempts.items()}
        return {ordinal: times for ordinal, times in changed.items() if times}

    def offsets(self) -> dict[int, int]:
        """By source, the number up to which no record is needed any more once what was shown is stored."""
        needed = {ordinal: attempt.needed_seqs() for ordinal, attempt in self._attempts.items()}
        return {
            source_id: min(source.applied_seq, needed[source.spec.ordinal].get(source.spec.rank, 2**62) - 1)
            for source_id, source in self._sources.items()
        }

    def last_steps(self) -> dict[int, int]:
        """By source, its largest step so far; sources without any are left out."""
        return {key: source.last_step for key, source in self._sources.items() if source.last_step >= 0}

    @property
    def num_late(self) -> int:
        """Reports that came too late to be merged."""
        return sum(attempt.num_late for attempt in self._attempts.values())

    def is_closed(self) -> bool:
        """Every known source has ended."""
        return bool(self._attempts) and all(attempt.mark.all_closed() for attempt in self._attempts.values())

    def memory(self) -> FoldMemory:
        """What to persist together with `offsets`."""
        return FoldMemory(
            applied={key: source.applied_seq for key, source in self._sources.items()},
            attempts={
                ordinal: AttemptMemory(released=attempt.released(), declared=attempt.declared_later())
                for ordinal, attempt in self._attempts.items()
            },
        )

    def restore(self, memory: FoldMemory) -> None:
        """Take over what `memory` gave, after the sources and their schemas were made known."""
        self._known = dict(memory.applied)
        for ordinal, remembered in memory.attempts.items():
            attempt = self._attempts.get(ordinal)
            if attempt is not None:
                attempt.times.restore(remembered.times)
                attempt.restore_released(remembered.released)
                attempt.restore_declared(remembered.declared)

    def _attempt(self, spec: FoldSource) -> AttemptFold:
        attempt = self._attempts.get(spec.ordinal)
        if attempt is None:
            attempt = self._attempts[spec.ordinal] = AttemptFold(
                ordinal=spec.ordinal,
                world_size=spec.world_size,
                silence_s=self._silence_s,
                make_layout=self._make_layout,
            )
        attempt.mark.expect(spec.world_size)
        return attempt


def _is_block(frame: wire.Frame) -> bool:
    steps = frame.steps
    return len(steps) >= BLOCK_STEPS and all(map(operator.lt, steps, steps[1:]))


def _put(
    attempt: AttemptFold,
    rank: int,
    seq: int,
    step: int,
    time_s: float,
    schema: wire.ScalarSchema | wire.LayerSchema,
    values_C: NDArray[np.float64],
    *,
    again: bool,
) -> list[Folded]:
    """One step of a frame."""
    if isinstance(schema, wire.ScalarSchema):
        names = [column.name for column in schema.columns]
        return attempt.scalars(rank, seq, step, time_s, names, values_C.tolist(), again=again)
    partials_LP = values_C.reshape(len(schema.layers), -1)
    return attempt.layers(rank, seq, step, time_s, schema.schema_id, partials_LP, again=again)
