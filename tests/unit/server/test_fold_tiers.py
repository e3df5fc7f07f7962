"""Ranks and steps that measured more statistics or fewer: what was not measured is absent, never 0 and never NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from gradiometer import wire
from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.folded import LAYER_STATISTICS, Folded, FoldedLayers, FoldedScalars, Layout
from gradiometer_server.fold.run_fold import SILENCE_S, FoldSource, RunFold
from gradiometer_server.fold.watches import LayerWatches

NORMS = ("norm", "rms", "num_nonfinite")
VALUES = np.array([3.0, 0.0, -4.0, 0.0])
FULL = {"count": 4, "sum": -1, "sum_squares": 25, "min": -4, "max": 3, "num_zeros": 2, "num_nonfinite": 0}


class Fold:
    """A fold of some ranks; schema ids are the caller's."""

    def __init__(self, world_size: int = 1) -> None:
        self.layouts: list[tuple[str, ...]] = []
        self.fold = RunFold(make_layout=self._layout)
        self._seqs = dict.fromkeys(range(world_size), 0)
        for rank in range(world_size):
            self.fold.add_source(
                FoldSource(source_id=rank, ordinal=1, rank=rank, world_size=world_size), now_s=0.0
            )

    def _layout(self, names: tuple[str, ...], numels: tuple[int, ...]) -> Layout:
        if names not in self.layouts:
            self.layouts.append(names)
        return Layout(layout_id=self.layouts.index(names), names=names, numels=numels)

    def say(self, record: wire.Record, rank: int = 0) -> list[Folded]:
        self._seqs[rank] += 1
        return self.fold.apply(rank, self._seqs[rank], record, 0.0)

    def declare(
        self,
        schema_id: int,
        *names: str,
        statistics: tuple[str, ...] = wire.STATISTICS,
        rank: int = 0,
        shards: int = 1,
    ) -> None:
        layers = tuple(layer(name, rank, 1 if name.startswith("own") else shards) for name in names)
        self.say(wire.LayerSchema(schema_id=schema_id, layers=layers, statistics=statistics), rank)

    def report(
        self, schema_id: int, step: int, *rows: Mapping[str, float], rank: int = 0
    ) -> tuple[list[FoldedLayers], dict[str, float]]:
        items = self.say(frame(schema_id, [step], rows), rank)
        scalars: dict[str, float] = {}
        for item in items:
            if isinstance(item, FoldedScalars):
                scalars.update(item.values)
        return [item for item in items if isinstance(item, FoldedLayers)], scalars


def layer(name: str, rank: int, shards: int) -> wire.Layer:
    """One with a shard of the size of `VALUES` on each rank."""
    numel = len(VALUES) * shards
    shard = (rank,) if shards > 1 else ()
    return wire.Layer(name=name, shape=(numel,), numel=numel, shard=shard, num_shards=shards)


def frame(schema_id: int, steps: Sequence[int], rows: Sequence[Mapping[str, float]]) -> wire.Frame:
    values = np.array([list(row.values()) for row in rows], dtype="<f8").tobytes()
    return wire.Frame(
        schema_id=schema_id,
        steps=tuple(steps),
        times=tuple(map(float, steps)),
        values=values * len(steps),
    )


def part(names: tuple[str, ...], **changed: float) -> dict[str, float]:
    """The statistics of `VALUES` that a schema of these names holds."""
    return {name: float({**FULL, **changed}[name]) for name in names}


def presence(values_L: NDArray[np.float64]) -> list[bool]:
    return [not absent for absent in is_absent(values_L).tolist()]


def test_a_step_of_norms_alone_has_norms_and_says_nothing_else() -> None:
    one = Fold()
    one.declare(1, "w", statistics=wire.NORM_STATISTICS)
    (layers,), scalars = one.report(1, 1, part(wire.NORM_STATISTICS))
    assert tuple(layers.statistics) == NORMS
    assert layers.statistics["norm"].tolist() == [5.0]
    assert layers.statistics["rms"].tolist() == [2.5]
    assert scalars == {"grad/norm": 5.0, "grad/num_nonfinite": 0.0}


def test_full_steps_and_norm_steps_of_one_rank_are_shown_at_once_and_alternate() -> None:
    one = Fold()
    one.declare(1, "w")
    one.declare(2, "w", statistics=wire.NORM_STATISTICS)
    for step in range(1, 7):
        full = step % 3 == 1
        names = wire.STATISTICS if full else wire.NORM_STATISTICS
        (layers,), scalars = one.report(1 if full else 2, step, part(names))
        assert layers.step == step
        assert tuple(layers.statistics) == (LAYER_STATISTICS if full else NORMS)
        assert ("grad/abs_max" in scalars) == ("grad/zero_fraction" in scalars) == full
        assert scalars["grad/norm"] == 5.0
    assert one.layouts == [("w",)], "the same layers, whatever was measured of them"
    assert one.fold.num_late == 0


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_column_that_one_shard_did_not_measure_is_absent_in_the_whole(full_rank: int) -> None:
    two = Fold(2)
    for rank in range(2):
        names = wire.STATISTICS if rank == full_rank else wire.NORM_STATISTICS
        two.declare(1, "shared", f"own{rank}", statistics=names, rank=rank, shards=2)
    rows = [part(wire.STATISTICS)] * 2, [part(wire.NORM_STATISTICS)] * 2
    two.report(1, 1, *rows[0 if full_rank == 0 else 1], rank=0)
    (layers,), scalars = two.report(1, 1, *rows[0 if full_rank == 1 else 1], rank=1)
    assert layers.layout.names == ("shared", "own0", "own1")
    own = [False, full_rank == 0, full_rank == 1]
    for name in LAYER_STATISTICS:
        expected = [True] * 3 if name in NORMS else own
        assert presence(layers.statistics[name]) == expected, name
    assert layers.statistics["norm"].tolist() == pytest.approx([math.sqrt(50), 5, 5])
    assert scalars == {"grad/norm": 10.0, "grad/num_nonfinite": 0.0, "grad/coverage_fraction": 1.0}


def test_a_rank_without_a_gradient_takes_nothing_away() -> None:
    two = Fold(2)
    two.declare(1, "w", rank=0, shards=2)
    two.declare(1, "w", statistics=wire.NORM_STATISTICS, rank=1, shards=2)
    two.report(1, 1, part(wire.STATISTICS), rank=0)
    (layers,), scalars = two.report(1, 1, part(wire.NORM_STATISTICS, count=0), rank=1)
    assert layers.statistics["zero_fraction"].tolist() == [0.5]
    assert scalars["grad/abs_max"] == 4.0


def test_any_part_of_the_statistics_gives_what_can_be_derived_from_it() -> None:
    one = Fold()
    names = ("count", "sum", "sum_squares", "num_zeros", "num_nonfinite")
    one.declare(1, "w", statistics=names)
    (layers,), scalars = one.report(1, 1, part(names))
    assert tuple(layers.statistics) == ("norm", "rms", "mean", "std", "zero_fraction", "num_nonfinite")
    assert layers.statistics["mean"].tolist() == [VALUES.mean()]
    assert layers.statistics["std"].tolist() == [VALUES.std()]
    assert "grad/abs_max" not in scalars
    assert scalars["grad/zero_fraction"] == 0.5


def test_a_nan_in_a_step_of_norms_names_its_rank() -> None:
    two = Fold(2)
    for rank in range(2):
        two.declare(1, "w", statistics=wire.NORM_STATISTICS, rank=rank, shards=2)
    two.report(1, 1, part(wire.NORM_STATISTICS), rank=0)
    bad = part(wire.NORM_STATISTICS, sum_squares=math.nan, num_nonfinite=2)
    (layers,), scalars = two.report(1, 1, bad, rank=1)
    assert {rank: counts.tolist() for rank, counts in layers.num_nonfinite_by_rank.items()} == {1: [2]}
    assert scalars["grad/num_nonfinite"] == 2
    assert math.isnan(scalars["grad/norm"])


def test_replicas_are_compared_whatever_else_was_measured() -> None:
    two = Fold(2)
    two.declare(1, "w", rank=0)
    two.declare(1, "w", statistics=wire.NORM_STATISTICS, rank=1)
    two.say(frame(1, [1], [part(wire.STATISTICS)]), 0)
    items = two.say(frame(1, [1], [part(wire.NORM_STATISTICS, sum_squares=26)]), 1)
    (mismatch,) = [item.mismatch for item in items if isinstance(item, FoldedLayers)]
    assert mismatch is not None
    assert mismatch.sum_squares == (25.0, 26.0)


def test_two_optimizers_of_one_rank_make_one_step() -> None:
    one = Fold()
    one.declare(1, "g.w")
    one.report(1, 1, part(wire.STATISTICS))
    # The second optimizer's first step, after the first one's was shown.
    one.declare(2, "d.w", statistics=wire.NORM_STATISTICS)
    (layers,), scalars = one.report(2, 1, part(wire.NORM_STATISTICS))
    assert layers.layout.names == ("g.w", "d.w")
    assert layers.statistics["norm"].tolist() == [5.0, 5.0]
    assert scalars["grad/norm"] == pytest.approx(math.sqrt(50))
    for step in (2, 3):
        assert one.report(1, step, part(wire.STATISTICS)) == ([], {})
        (layers,), _ = one.report(2, step, part(wire.NORM_STATISTICS))
        assert (layers.step, layers.statistics["norm"].tolist()) == (step, [5.0, 5.0])
        assert presence(layers.statistics["mean"]) == [True, False]
    assert one.fold.num_late == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_further_optimizer_of_a_step_is_merged_though_the_step_was_whole_before(world_size: int) -> None:
    """Followers that step before the clock, each in a write of its own: no schema announces the next one."""
    ranks = range(world_size)
    fold = Fold(world_size)
    for schema_id in (1, 2, 3):
        for rank in ranks:
            fold.declare(schema_id, f"w{schema_id}", rank=rank, shards=world_size)
            layers, scalars = fold.report(schema_id, 1, part(wire.STATISTICS), rank=rank)
        assert [one.step for one in layers] == [1], "the newest step is shown at once"
        assert scalars["grad/norm"] == pytest.approx(math.sqrt(25 * schema_id * world_size))
    assert fold.fold.num_late == 0
    for schema_id in (1, 2, 3):
        for rank in ranks:
            layers, scalars = fold.report(schema_id, 2, part(wire.STATISTICS), rank=rank)
            assert bool(layers) == (schema_id == 3 and rank == ranks[-1])
    assert scalars["grad/norm"] == pytest.approx(math.sqrt(75 * world_size))


def test_the_newest_step_is_needed_until_its_ranks_go_on_end_or_fall_silent() -> None:
    two = Fold(2)
    for rank in range(2):
        two.declare(1, "w", rank=rank, shards=2)
        two.report(1, 1, part(wire.STATISTICS), rank=rank)
    assert two.fold.offsets() == {0: 1, 1: 1}, "a server that starts again reads step 1 again"
    for rank in range(2):
        two.report(1, 2, part(wire.STATISTICS), rank=rank)
    assert two.fold.offsets() == {0: 2, 1: 2}
    assert two.fold.tick(SILENCE_S + 1.0) == []
    assert two.fold.offsets() == {0: 3, 1: 3}
    for rank in range(2):
        two.report(1, 3, part(wire.STATISTICS), rank=rank)
    for rank in range(2):
        two.say(wire.Event(kind="exit", time=4.0, step=3, attributes={"code": 0}), rank)
    assert two.fold.offsets() == {0: 5, 1: 5}


def test_a_parameter_in_several_watches_counts_once_in_totals() -> None:
    one = Fold()
    one.declare(1, "w", "v")
    shared = [wire.Layer(name=f"{name}.w", shape=(4,), numel=4, same_as="w") for name in "xy"]
    for schema_id, twin in enumerate(shared, 2):
        one.say(wire.LayerSchema(schema_id=schema_id, layers=(twin, layer(f"own{schema_id}", 0, 1))))
    row, none = part(wire.STATISTICS), part(wire.STATISTICS, count=0)
    one.report(1, 1, row, row)
    one.report(2, 1, part(wire.STATISTICS, num_nonfinite=1), row)
    (layers,), scalars = one.report(3, 1, row, row)
    assert layers.layout.names == ("w", "v", "x.w", "own2", "y.w", "own3")
    assert layers.statistics["norm"].tolist() == [5.0] * 6, "each watch shows what it read"
    assert scalars["grad/norm"] == 10.0
    assert (scalars["grad/num_nonfinite"], scalars["grad/zero_fraction"]) == (0.0, 0.5)
    # Whichever has a gradient counts, if the first has none in this step.
    one.report(1, 2, none, row)
    one.report(2, 2, row, row)
    _, scalars = one.report(3, 2, row, row)
    assert scalars["grad/norm"] == 10.0
    # A watch that rests is not there at all.
    one.report(2, 3, row, none)
    _, scalars = one.report(2, 4, row, none)
    assert scalars["grad/norm"] == 5.0


def test_layers_that_call_each_other_the_same_count_once() -> None:
    one = Fold()
    pairs = [wire.Layer(name=a, shape=(4,), numel=4, same_as=b) for a, b in ("ab", "ba", "cc", "d?")]
    one.say(wire.LayerSchema(schema_id=1, layers=tuple(pairs)))
    _, scalars = one.report(1, 1, *[part(wire.STATISTICS)] * 4)
    assert scalars["grad/norm"] == pytest.approx(math.sqrt(75))


def test_an_optimizer_that_rests_holds_the_others_up_by_one_step() -> None:
    one = Fold()
    one.declare(1, "g.w")
    one.declare(2, "d.w")
    one.report(1, 1, part(wire.STATISTICS))
    one.report(2, 1, part(wire.STATISTICS))
    assert one.report(1, 2, part(wire.STATISTICS)) == ([], {})
    (layers,), _ = one.report(1, 3, part(wire.STATISTICS))
    assert (layers.step, presence(layers.statistics["norm"])) == (2, [True, False])


def test_schemas_that_share_a_layer_are_of_one_optimizer() -> None:
    watches = LayerWatches()

    def declare(schema_id: int, *names: str) -> None:
        layers = tuple(wire.Layer(name=name, shape=(1,), numel=1) for name in names)
        watches.declare(0, wire.LayerSchema(schema_id=schema_id, layers=layers))

    declare(1, "a")
    declare(2, "a", "b")
    declare(3, "c")
    assert watches.num == 2
    assert watches.is_whole(0, {2: None, 3: None})
    assert not watches.is_whole(0, {1: None, 2: None})
    declare(4, "a", "b", "c")
    assert watches.num == 2
