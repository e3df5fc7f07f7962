"""However the ranks' records are interleaved, repeated or read again after a crash, the stored points are the same."""

from __future__ import annotations

import math
import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gradiometer import wire
from gradiometer_server.domain.folded import Folded, FoldedLayers, FoldedScalars, Layout
from gradiometer_server.fold.run_fold import FoldMemory, FoldSource, RunFold

LAYERS = 3
Points = dict[tuple[str, int | None, int], bytes]


class Log:
    """Records of several ranks, and the points that a store would hold after folding them."""

    def __init__(self, records: dict[int, list[wire.Record]]) -> None:
        self.records = records
        self.points: Points = {}
        self._layouts: dict[tuple[str, ...], Layout] = {}

    def layout(self, names: tuple[str, ...], numels: tuple[int, ...]) -> Layout:
        return self._layouts.setdefault(
            names, Layout(layout_id=len(self._layouts) + 1, names=names, numels=numels)
        )

    def new_fold(self, folded: dict[int, int], memory: FoldMemory | None, *, now_s: float) -> RunFold:
        """A fold as it is after a start of the server."""
        fold = RunFold(make_layout=self.layout)
        for rank, records in self.records.items():
            spec = FoldSource(
                source_id=rank + 1,
                ordinal=1,
                rank=rank,
                world_size=len(self.records),
                folded_seq=folded.get(rank + 1, 0),
                # As the store has it: its exit was seen, and nothing of it is left in the log.
                closed=folded.get(rank + 1, 0) == len(records),
            )
            fold.add_source(spec, now_s)
            for record in records[: spec.folded_seq]:
                if isinstance(record, (wire.ScalarSchema, wire.LayerSchema)):
                    fold.declare(rank + 1, record)
        if memory is not None:
            times = {
                step: struct.unpack("<d", data)[0]
                for (key, _, step), data in self.points.items()
                if key == "_time"
            }
            for attempt in memory.attempts.values():
                attempt.times = times
            fold.restore(memory)
        return fold

    def store(self, fold: RunFold, items: list[Folded]) -> None:
        for item in items:
            if isinstance(item, FoldedScalars):
                self._store_scalars(item)
            elif isinstance(item, FoldedLayers):
                for name, values_L in item.statistics.items():
                    for layer, value in zip(item.layout.names, values_L, strict=True):
                        self.points[f"{name}:{layer}", None, item.step] = struct.pack("<d", value)
        for times in fold.take_times().values():
            for step, time_s in times.items():
                self.points["_time", None, step] = struct.pack("<d", time_s)

    def _store_scalars(self, item: FoldedScalars) -> None:
        for name, value in item.values.items():
            self.points[name, None, item.step] = struct.pack("<d", value)
        for name, ranks in item.by_rank.items():
            for rank, value in ranks.items():
                self.points[name, rank, item.step] = struct.pack("<d", value)


values = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.just(math.nan)


@st.composite
def subsets(draw: st.DrawFn) -> tuple[str, ...]:
    """Statistics that a layer schema may hold, in wire order."""
    chosen = draw(st.sets(st.sampled_from(wire.STATISTICS))) | set(wire.NORM_STATISTICS)
    return tuple(name for name in wire.STATISTICS if name in chosen)


@st.composite
def logs(draw: st.DrawFn) -> dict[int, list[wire.Record]]:
    """Up to three ranks, each with its own metrics, layers (sharded or pipeline stages), statistics and pace of frames."""
    world = draw(st.integers(1, 3))
    steps = draw(st.integers(1, 12))
    shared = draw(st.lists(st.sampled_from(["train/loss", "lr", "memory"]), unique=True, min_size=1))
    merges = {name: draw(st.sampled_from(["mean", "sum", "min", "max"])) for name in shared}
    sharded = draw(st.booleans())
    records: dict[int, list[wire.Record]] = {}
    for rank in range(world):
        own = [f"rank{rank}/only"] if draw(st.booleans()) else []
        names = [*shared, *own]
        columns = tuple(wire.Column(name=name, merge=merges.get(name, "mean")) for name in names)
        layers = tuple(
            wire.Layer(
                name=f"layer{i}" if sharded else f"stage{rank}.layer{i}",
                shape=(8,),
                numel=8,
                shard=(rank,) if sharded and world > 1 else (),
                num_shards=world if sharded else 1,
            )
            for i in range(LAYERS)
        )
        said: list[wire.Record] = [
            wire.ScalarSchema(schema_id=1, columns=columns),
            wire.LayerSchema(schema_id=2, layers=layers),
            wire.LayerSchema(schema_id=3, layers=layers, statistics=draw(subsets())),
        ]
        width = {schema.schema_id: len(schema.statistics) for schema in said if hasattr(schema, "statistics")}
        for step in range(1, steps + 1):
            row = draw(st.lists(values, min_size=len(names), max_size=len(names)))
            schema_id = draw(st.sampled_from([2, 3]))
            size = LAYERS * width[schema_id]
            partials = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
            said.append(_frame(1, step, step + rank / 8, row))
            said.append(_frame(schema_id, step, step + 0.5, partials))
        said.append(wire.Event(kind="exit", time=99.0, attributes={"code": 0}))
        records[rank] = said
    return records


def _frame(schema_id: int, step: int, time_s: float, row: list[float]) -> wire.Frame:
    return wire.Frame(
        schema_id=schema_id, steps=(step,), times=(time_s,), values=np.array(row, dtype="<f8").tobytes()
    )


def _ordered(records: dict[int, list[wire.Record]]) -> Points:
    """The reference: record by record, all ranks in step."""
    log = Log(records)
    fold = log.new_fold({}, None, now_s=0.0)
    for index in range(max(map(len, records.values()))):
        for rank, said in records.items():
            if index < len(said):
                log.store(fold, fold.apply(rank + 1, index + 1, said[index], 0.0))
    return log.points


@settings(max_examples=150, deadline=None)
@given(records=logs(), data=st.data())
def test_any_interleaving_with_repeats_and_restarts_gives_the_same_points(
    records: dict[int, list[wire.Record]], data: st.DataObject
) -> None:
    log = Log(records)
    fold, folded, memory = log.new_fold({}, None, now_s=0.0), {}, None
    position = dict.fromkeys(records, 0)
    while any(position[rank] < len(said) for rank, said in records.items()):
        rank = data.draw(st.sampled_from([r for r in records if position[r] < len(records[r])]), label="rank")
        burst = data.draw(st.integers(1, 9), label="burst")
        start = max(0, position[rank] - data.draw(st.integers(0, 3), label="repeated"))
        for index in range(start, min(position[rank] + burst, len(records[rank]))):
            log.store(fold, fold.apply(rank + 1, index + 1, records[rank][index], 0.0))
        position[rank] = min(position[rank] + burst, len(records[rank]))
        event = data.draw(st.sampled_from(["", "", "flush", "crash"]), label="event")
        if event == "flush":
            folded, memory = fold.offsets(), fold.memory()
        if event == "crash":
            fold = log.new_fold(folded, memory, now_s=0.0)
            position = {rank: folded.get(rank + 1, 0) for rank in records}
    log.store(fold, fold.tick(0.0))
    assert log.points == _ordered(records)
    assert fold.offsets() == {rank + 1: len(said) for rank, said in records.items()}, "nothing is left behind"
