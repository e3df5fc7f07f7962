"""Turns numbers into encoded wire records: declares each schema once and gathers steps into frames.

Pure: no clock, no I/O. `take` gives the records of a batch; `commit` or `rollback` says whether they were stored, so
that a schema lost to a full disk is declared again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from gradiometer import limits, wire
from gradiometer.drops import Drops
from gradiometer.plain import plain
from gradiometer.recorder import Ring

MAX_SCALAR_SCHEMAS: Final = 256
"""Sets of columns with a schema of their own. Later sets are written column by column, so that a run that logs a
new combination of names at every step does not declare a schema at every step."""
LAYER_STEPS: Final = 8
"""Steps whose layers may come before their scalars. A rule that sees an infinite gradient waits for the scaler's word,
which is a scalar, half as long again and more, but not for a whole batch of a fast loop."""
_RECENT_SCHEMAS: Final = 64
FRAME_BYTES: Final = 1024 * 1024
"""A frame is closed when it holds this much; a single row may be larger, up to `wire.MAX_RECORD_BYTES`."""


class RecordTooLarge(ValueError):
    """A record that the server would refuse; the message says which."""


class TooManyNames(ValueError):
    """A source may not declare more sets of names; the message says which of them is left out."""


class _OpenFrame:
    __slots__ = ("num_bytes", "rows", "schema_id", "steps", "times")

    def __init__(self, schema_id: int) -> None:
        self.schema_id = schema_id
        self.steps: list[int] = []
        self.times: list[float] = []
        self.rows: list[bytes] = []
        self.num_bytes = 0

    def add(self, step: int, time: float, row: bytes) -> None:
        self.steps.append(step)
        self.times.append(time)
        self.rows.append(row)
        self.num_bytes += len(row)

    def encode(self) -> bytes:
        frame = wire.Frame(
            schema_id=self.schema_id,
            steps=tuple(self.steps),
            times=tuple(self.times),
            values=b"".join(self.rows),
        )
        return wire.encode(frame)


class Records:
    """Builds the record stream of one source.

    Attributes:
        ring: keeps the layers of the last steps.
    """

    def __init__(self, ring: Ring | None = None) -> None:
        self.ring = ring or Ring(Drops())
        self._next_schema_id = 1
        self._scalar_schemas: dict[tuple[wire.Column, ...], int] = {}
        # Hashing the columns at every step takes longer than packing their values. Those kept here live on, so that
        # no other columns get their identity.
        self._recent_scalars: dict[int, tuple[tuple[wire.Column, ...], int]] = {}
        self._layer_schemas: dict[tuple[tuple[wire.Layer, ...], tuple[str, ...]], int] = {}
        # By identity first: hashing thousands of layers at every step would cost more than encoding them.
        self._layers_by_id: dict[tuple[int, tuple[str, ...]], tuple[tuple[wire.Layer, ...], int]] = {}
        # By id, so that the ring's steps can be declared again long after.
        self._layer_declarations: dict[int, bytes] = {}
        self._undeclared: set[int] = set()
        self._layer_frames: dict[int, _OpenFrame] = {}
        self._scalar_frames: dict[int, _OpenFrame] = {}
        self._schemas_of_name: dict[str, list[int]] = {}
        self._overlaps: dict[int, set[int]] = {}
        self._layered_steps: set[int] = set()
        self._done: list[bytes] = []
        self._in_flight: list[int] = []

    def add_scalars(
        self, step: int, time: float, columns: tuple[wire.Column, ...], row: Sequence[float]
    ) -> None:
        """Add one step's values of a set of columns."""
        recent = self._recent_scalars.get(id(columns))
        known = recent[1] if recent is not None else self._scalar_schemas.get(columns)
        if known is None and len(columns) > 1 and len(self._scalar_schemas) >= MAX_SCALAR_SCHEMAS:
            self._add_one_by_one(step, time, columns, row)
            return
        if known is None:
            if self._next_schema_id > limits.MAX_SCHEMAS:
                raise TooManyNames(f"{columns[0].name!r}; do not put a changing number into a name")
            known = self._scalar_schemas[columns] = self._new_id()
            self._note_overlaps(known, columns)
        if recent is None:
            if len(self._recent_scalars) >= _RECENT_SCHEMAS:
                self._recent_scalars.clear()
            self._recent_scalars[id(columns)] = (columns, known)
        if known in self._overlaps:
            self._end_newer_scalars(known)
        if known in self._undeclared:
            self._declare(known, wire.encode(wire.ScalarSchema(schema_id=known, columns=columns)))
        self._add(self._scalar_frames, known, step, time, struct.pack(f"<{len(row)}d", *row))

    def _note_overlaps(self, schema_id: int, columns: tuple[wire.Column, ...]) -> None:
        """Find out which sets of names share one with this new set."""
        others: set[int] = set()
        for column in columns:
            of_name = self._schemas_of_name.setdefault(column.name, [])
            others.update(of_name)
            of_name.append(schema_id)
        for other in others:
            self._overlaps.setdefault(other, set()).add(schema_id)
        if others:
            self._overlaps[schema_id] = others

    def _end_newer_scalars(self, schema_id: int) -> None:
        """Close the open frames if one that was begun after this schema's shares a name with it.

        Otherwise what is said of a metric now would come before what was said of it earlier.
        """
        overlaps = self._overlaps[schema_id]
        for key in reversed(self._scalar_frames):
            if key == schema_id:
                return
            if key in overlaps and schema_id in self._scalar_frames:
                self._close_frames()
                return

    def _add_one_by_one(
        self, step: int, time: float, columns: tuple[wire.Column, ...], row: Sequence[float]
    ) -> None:
        refused: TooManyNames | None = None
        for column, value in zip(columns, row, strict=True):
            try:
                self.add_scalars(step, time, (column,), (value,))
            except TooManyNames as error:
                refused = error
        if refused is not None:
            raise refused

    def add_layers(
        self,
        step: int,
        time: float,
        layers: tuple[wire.Layer, ...],
        values: bytes,
        statistics: tuple[str, ...] = wire.STATISTICS,
    ) -> int:
        """Add one step's table: little-endian float64 of shape (layers, statistics). Returns its schema."""
        known = self._layers_by_id.get((id(layers), statistics))
        if known is None or known[0] is not layers:
            schema_id = self._layer_schemas.get((layers, statistics))
            if schema_id is None:
                schema_id = self._layer_schemas[layers, statistics] = self._new_id()
                declaration = wire.LayerSchema(schema_id=schema_id, layers=layers, statistics=statistics)
                self._layer_declarations[schema_id] = wire.encode(declaration)
            known = self._layers_by_id[id(layers), statistics] = (layers, schema_id)
        if step not in self._layered_steps and len(self._layered_steps) >= LAYER_STEPS:
            self._close_frames()
        self._layered_steps.add(step)
        self._end_older_layers(step, known[1])
        if known[1] in self._undeclared:
            self._declare(known[1], self._layer_declarations[known[1]])
        self._add(self._layer_frames, known[1], step, time, values)
        self.ring.keep(known[1], step, time, values, len(statistics))
        return known[1]

    def _end_older_layers(self, step: int, schema_id: int) -> None:
        """Close the layer frames of earlier steps, so that all schemas of a step come before those of the next.

        The server takes a rank's word on a step as complete once the rank speaks of a later one.
        """
        others = [frame for key, frame in self._layer_frames.items() if key != schema_id]
        if any(frame.steps[-1] < step for frame in others):
            self._close(self._layer_frames)

    def add_event(self, event: wire.Event) -> None:
        """Add an event after everything that was added before."""
        self._close_frames()
        try:
            record = wire.encode(event)
        except UnicodeEncodeError:
            # Texts of errors, paths and names may hold what UTF-8 cannot carry; most do not, and are not looked at.
            record = wire.encode(msgspec.structs.replace(event, attributes=plain(event.attributes)))
        self._append(record)

    def add_histogram(
        self, step: int, time: float, schema_id: int, values: bytes, reason: str, about: int | None
    ) -> None:
        """Add one step's histograms of the layers of a schema that was used in this batch; see `wire.Detail`."""
        detail = wire.Detail(
            kind="histogram",
            reason=reason[: wire.MAX_REASON_CHARS],
            trigger_step=about,
            schema_id=schema_id,
            steps=(step,),
            times=(time,),
            values=values,
        )
        self._append(wire.encode(detail))

    def add_ring(self, *, final: bool = False) -> None:
        """Add what the ring has to send, if anything."""
        for record in self.ring.due(final=final):
            if isinstance(record, wire.Detail) and record.schema_id in self._undeclared:
                self._declare(record.schema_id, self._layer_declarations[record.schema_id])
            self._append(wire.encode(record))

    def take(self) -> list[bytes]:
        """The records since the last call, in order."""
        self._close_frames()
        done, self._done = self._done, []
        return done

    def commit(self) -> None:
        """What was taken is stored."""
        self._in_flight.clear()

    def rollback(self) -> None:
        """What was taken is lost: declare its schemas again."""
        self._undeclared.update(self._in_flight)
        self._in_flight.clear()

    def _new_id(self) -> int:
        schema_id = self._next_schema_id
        self._next_schema_id += 1
        self._undeclared.add(schema_id)
        return schema_id

    def _declare(self, schema_id: int, record: bytes) -> None:
        self._append(record)
        self._undeclared.discard(schema_id)
        self._in_flight.append(schema_id)

    def _add(self, frames: dict[int, _OpenFrame], schema_id: int, step: int, time: float, row: bytes) -> None:
        frame = frames.get(schema_id)
        if frame is not None and frame.num_bytes + len(row) > FRAME_BYTES:
            self._close_frames()
            frame = None
        if frame is None:
            frame = frames[schema_id] = _OpenFrame(schema_id)
        frame.add(step, time, row)

    def _close_frames(self) -> None:
        # Layers before scalars: whoever reads the scalars of a step can have its layers already.
        self._close(self._layer_frames)
        self._close(self._scalar_frames)
        self._layered_steps.clear()

    def _close(self, frames: dict[int, _OpenFrame]) -> None:
        for frame in frames.values():
            self._append(frame.encode())
        frames.clear()

    def _append(self, record: bytes) -> None:
        if len(record) > wire.MAX_RECORD_BYTES:
            raise RecordTooLarge(f"a record of {len(record)} bytes; the server takes {wire.MAX_RECORD_BYTES}")
        self._done.append(record)
