"""When a run's values are shown: ranks that are slow, silent, closed, late or missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from gradiometer import wire
from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.folded import Folded, FoldedEvent, FoldedLayers, FoldedScalars, Layout
from gradiometer_server.fold import attempt
from gradiometer_server.fold.lane import MAX_CELLS, MAX_HELD
from gradiometer_server.fold.run_fold import SILENCE_S, FoldSource, RunFold
from gradiometer_server.fold.times import MAX_STEPS, StepTimes
from gradiometer_server.fold.watermark import NO_BOUND, Watermark


class Ranks:
    """Some ranks of one attempt feeding a fold; source ids are ranks + 1."""

    def __init__(self, world_size: int, present: Sequence[int] | None = None) -> None:
        self.layouts: list[tuple[str, ...]] = []
        self.fold = RunFold(make_layout=self._layout)
        self.now_s = 1000.0
        self._seqs: dict[int, int] = {}
        self._world_size = world_size
        for rank in range(world_size) if present is None else present:
            self.join(rank)

    def _layout(self, names: tuple[str, ...], numels: tuple[int, ...]) -> Layout:
        if names not in self.layouts:
            self.layouts.append(names)
        return Layout(layout_id=self.layouts.index(names) + 1, names=names, numels=numels)

    def join(self, rank: int) -> None:
        self._seqs[rank] = 0
        spec = FoldSource(source_id=rank + 1, ordinal=1, rank=rank, world_size=self._world_size)
        self.fold.add_source(spec, self.now_s)

    def say(self, rank: int, record: wire.Record) -> list[Folded]:
        self._seqs[rank] += 1
        return self.fold.apply(rank + 1, self._seqs[rank], record, self.now_s)

    def declare(self, rank: int, *names: str, merge: str = "mean") -> None:
        columns = tuple(wire.Column(name=name, merge=merge) for name in names)  # type: ignore[arg-type]
        assert self.say(rank, wire.ScalarSchema(schema_id=1, columns=columns)) == []

    def declare_layers(self, rank: int, *names: str) -> None:
        layers = tuple(wire.Layer(name=name, shape=(4,), numel=4) for name in names)
        assert self.say(rank, wire.LayerSchema(schema_id=2, layers=layers)) == []

    def report(self, rank: int, step: int, *values: float) -> list[Folded]:
        return self.say(rank, _frame(1, step, values))

    def report_layers(self, rank: int, step: int, *counts: float) -> list[Folded]:
        return self.say(
            rank, _frame(2, step, [value for n in counts for value in (n, n, n, 1.0, 1.0, 0.0, 0.0)])
        )

    def exit(self, rank: int) -> list[Folded]:
        return self.say(rank, wire.Event(kind="exit", time=5.0, attributes={"code": 0}))

    def tick(self, later_s: float = 0.0) -> list[Folded]:
        self.now_s += later_s
        return self.fold.tick(self.now_s)


def _frame(schema_id: int, step: int, values: Sequence[float]) -> wire.Frame:
    data = np.array(values, dtype="<f8").tobytes()
    return wire.Frame(schema_id=schema_id, steps=(step,), times=(step * 1.0,), values=data)


def scalars(items: Sequence[Folded]) -> list[tuple[int, dict[str, float]]]:
    return [(item.step, dict(item.values)) for item in items if isinstance(item, FoldedScalars)]


def test_a_world_of_one_is_shown_at_once_and_leaves_nothing_behind() -> None:
    one = Ranks(1)
    one.declare(0, "a", "b")
    assert scalars(one.report(0, 1, 1.0, math.inf)) == [(1, {"a": 1.0, "b": math.inf})]
    assert one.fold.offsets() == {1: 2}


def test_a_frame_of_many_steps_is_shown_in_the_order_of_its_steps() -> None:
    one = Ranks(1)
    one.declare(0, "a")
    frame = wire.Frame(
        schema_id=1, steps=(3, 1, 2), times=(3.0, 1.0, 2.0), values=np.array([30.0, 10.0, 20.0]).tobytes()
    )
    assert scalars(one.say(0, frame)) == [(1, {"a": 10.0}), (2, {"a": 20.0}), (3, {"a": 30.0})]
    assert one.fold.take_times() == {1: {1: 1.0, 2: 2.0, 3: 3.0}}


def test_a_step_waits_for_all_ranks_and_keeps_each_ranks_value() -> None:
    two = Ranks(2)
    for rank in range(2):
        two.declare(rank, "a")
    assert two.report(0, 1, 1.0) == []
    (item,) = two.report(1, 1, 2.0)
    assert isinstance(item, FoldedScalars)
    assert (item.values, item.by_rank) == ({"a": 1.5}, {"a": {0: 1.0, 1: 2.0}})
    assert item.time_s == 1.0


def test_a_metric_of_one_rank_alone_is_not_held_up() -> None:
    two = Ranks(2)
    two.declare(0, "a")
    two.declare(1, "b")
    (item,) = two.report(0, 1, 1.0)
    assert isinstance(item, FoldedScalars)
    assert (item.values, item.by_rank) == ({"a": 1.0}, {})


def test_a_rank_that_passed_a_step_is_not_waited_for() -> None:
    three = Ranks(3)
    for rank in range(3):
        three.declare(rank, "a")
    three.report(0, 1, 1.0)
    three.report(1, 1, 3.0)
    assert three.report(2, 2, 9.0) == [], "ranks 0 and 1 may still say more of step 1"
    three.report(0, 2, 9.0)
    assert scalars(three.report(1, 2, 9.0)) == [(1, {"a": 2.0}), (2, {"a": 9.0})]


def test_a_silent_rank_is_waited_for_only_so_long_and_merged_in_when_it_returns() -> None:
    two = Ranks(2)
    for rank in range(2):
        two.declare(rank, "a")
    two.report(0, 1, 1.0)
    assert two.tick(SILENCE_S - 1) == []
    two.report(0, 2, 2.0)
    shown = two.tick(2)
    assert scalars(shown) == [(1, {"a": 1.0})], "step 2 is the newest of the only live rank"
    assert two.fold.offsets()[1] < 2, "the log keeps what may be merged again"
    assert scalars(two.report(1, 1, 5.0)) == [(1, {"a": 3.0})]
    assert scalars(two.report(1, 2, 6.0)) == [(2, {"a": 4.0})]
    assert two.fold.num_late == 0


def test_a_closed_rank_is_not_waited_for() -> None:
    two = Ranks(2)
    for rank in range(2):
        two.declare(rank, "a")
    two.report(0, 1, 1.0)
    items = two.exit(1)
    assert [item.kind for item in items if isinstance(item, FoldedEvent)] == ["exit"]
    assert scalars(two.report(0, 2, 1.0)) == [(1, {"a": 1.0})]
    assert scalars(two.exit(0)) == [(2, {"a": 1.0})]
    assert two.fold.is_closed()
    assert two.fold.offsets() == {1: 4, 2: 2}


def test_a_rank_that_never_came_is_waited_for_at_the_start_only() -> None:
    two = Ranks(2, present=[0])
    two.declare_layers(0, "w")
    two.report_layers(0, 1, 4.0)
    two.report_layers(0, 2, 4.0)
    assert two.tick() == [], "a layout that grows rank by rank at every start would be no layout"
    two.now_s += SILENCE_S
    shown = [item for item in two.report_layers(0, 3, 4.0) if isinstance(item, FoldedLayers)]
    assert [item.step for item in shown] == [1, 2]
    assert two.exit(0)
    assert not two.fold.is_closed(), "rank 1 may still come"


def test_layers_of_all_ranks_make_one_layout_and_missing_ones_are_told() -> None:
    two = Ranks(2)
    two.declare_layers(1, "stage1.w")
    two.declare_layers(0, "stage0.w")
    two.report_layers(1, 1, 4.0)
    layers, totals = two.report_layers(0, 1, 4.0)
    assert isinstance(layers, FoldedLayers)
    assert layers.layout.names == ("stage0.w", "stage1.w")
    assert (layers.expected, layers.seen) == (2, 2)
    assert isinstance(totals, FoldedScalars)
    assert totals.values["grad/norm"] == math.sqrt(8.0)
    two.report_layers(0, 2, 4.0)
    two.exit(1)
    (alone,) = [item for item in two.exit(0) if isinstance(item, FoldedLayers)]
    assert (alone.step, alone.layout, alone.expected, alone.seen) == (2, layers.layout, 2, 1)


def test_a_missing_shard_is_counted() -> None:
    two = Ranks(2)
    for rank in range(2):
        layer = wire.Layer(name="w", shape=(8,), numel=8, shard=(rank,), num_shards=2)
        two.say(rank, wire.LayerSchema(schema_id=2, layers=(layer,)))
    two.report_layers(0, 1, 4.0)
    two.exit(1)
    (layers,) = [item for item in two.report_layers(0, 2, 4.0) if isinstance(item, FoldedLayers)]
    assert (layers.step, layers.expected, layers.seen) == (1, 2, 1)
    assert (layers.coverage, layers.num_incomplete, layers.missing_ranks) == (0.5, 1, (1,))
    assert is_absent(layers.statistics["norm"]).all(), "half of it is not the norm"


def test_a_replica_that_differs_is_told() -> None:
    two = Ranks(2)
    for rank in range(2):
        two.declare_layers(rank, "w")
    told = []
    for step in range(1, 4):
        two.report_layers(0, step, 4.0)
        told += [item for item in two.report_layers(1, step, 5.0) if isinstance(item, FoldedLayers)]
    assert [item.step for item in told] == [1, 2, 3]
    for item in told:
        assert item.mismatch is not None
        assert (item.mismatch.layer, item.mismatch.ranks) == ("w", (0, 1))


def test_more_than_the_held_steps_are_too_late_and_counted() -> None:
    two = Ranks(2)
    for rank in range(2):
        two.declare(rank, "a")
    last = MAX_HELD + 50
    two.tick(SILENCE_S + 1)
    for step in range(1, last + 1):
        two.report(0, step, 1.0)
    assert two.fold.offsets()[1] > 1, "the log does not grow for ever"
    late = two.report(1, 1, 3.0)
    assert two.fold.num_late == 1
    (item,) = late
    assert isinstance(item, FoldedScalars)
    assert (item.values, item.by_rank) == ({}, {"a": {1: 3.0}}), (
        "the merged value is not overwritten by one rank's"
    )
    assert scalars(two.report(1, last - 1, 3.0)) == [(last - 1, {"a": 2.0})]


def test_a_rank_far_ahead_does_not_fill_the_memory() -> None:
    two = Ranks(2)
    for rank in range(2):
        two.declare(rank, "a")
    shown = []
    for step in range(MAX_CELLS + 10):
        shown += scalars(two.report(0, step, float(step)))
    assert [step for step, _ in shown] == list(range(10))


def test_metrics_with_their_own_step_counters_do_not_disturb_each_other() -> None:
    two = Ranks(2)
    for rank in range(2):
        two.declare(rank, "micro")
        columns = (wire.Column(name="lr"),)
        two.say(rank, wire.ScalarSchema(schema_id=3, columns=columns))
    seen = []
    for step in range(1, 30):
        for rank in range(2):
            seen += scalars(two.report(rank, step * 4, 1.0))
            seen += scalars(two.say(rank, _frame(3, step, [2.0])))
    assert two.fold.num_late == 0
    assert [step for step, values in seen if "lr" in values] == list(range(1, 30))
    assert [step for step, values in seen if "micro" in values] == list(range(4, 120, 4))


def test_a_record_applied_again_changes_nothing() -> None:
    one = Ranks(1)
    one.declare(0, "a")
    one.report(0, 1, 1.0)
    assert one.fold.apply(1, 2, _frame(1, 1, [7.0]), 0.0) == []
    assert one.fold.apply(1, 1, wire.Event(kind="exit", time=0.0), 0.0) == []
    assert not one.fold.is_closed()


def test_the_time_of_a_step_is_the_earliest_that_any_rank_gave() -> None:
    times = StepTimes()
    times.report(5, 10.0)
    times.report(5, 12.0)
    assert times.take_changed() == {5: 10.0}
    times.report(5, 9.0)
    assert times.take_changed() == {5: 9.0}
    for step in range(10, 10 + MAX_STEPS):
        times.report(step, float(step))
    times.take_changed()
    times.report(5, 1.0)
    assert times.take_changed() == {}, "a step long gone is left alone"


@pytest.mark.parametrize(
    ("world", "said", "closed", "after_s", "emit", "final"),
    [
        (1, {}, [], 0, 0, 0),
        (1, {0: 5}, [], 0, 5, 5),
        (1, {0: 5}, [0], 0, NO_BOUND, NO_BOUND),
        (2, {0: 5}, [], 0, 0, 0),
        (2, {0: 5}, [], 30, NO_BOUND, 0),
        (2, {0: 5, 1: 3}, [], 0, 3, 3),
        (2, {0: 5, 1: 3}, [1], 0, 5, 5),
        (2, {0: 5, 1: 3}, [1], 30, NO_BOUND, 5),
    ],
)
def test_watermark(
    world: int, said: dict[int, int], closed: list[int], after_s: float, emit: int, final: int
) -> None:
    mark = Watermark(world_size=world, silence_s=30.0)
    for rank, step in said.items():
        mark.heard(rank, 100.0, step=step)
    for rank in closed:
        mark.close(rank, 100.0)
    assert mark.emit_below(100.0 + after_s, {}) == emit
    assert mark.final_below({}) == final


def test_statistics_of_many_ranks_that_wait_for_one_are_bounded_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value_bytes = 8 * len(wire.STATISTICS)
    monkeypatch.setattr(attempt, "_MAX_LAYER_BYTES", 40 * value_bytes)
    eight = Ranks(8)
    for rank in range(8):
        eight.declare_layers(rank, "w")
    for step in range(1, 21):
        for rank in range(7):
            eight.report_layers(rank, step, 4.0)
    lane = eight.fold._attempts[1]._layers
    assert sum(len(cell.by_rank) for cell in lane._cells.values()) <= 40
    late = eight.fold.num_late
    eight.report_layers(7, 20, 4.0)
    assert eight.fold.num_late == late, "a step that is still held takes the last rank in"
    eight.report_layers(7, 1, 4.0)
    assert eight.fold.num_late == late + 1
