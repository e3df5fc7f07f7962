"""What is missing of a gradient shows, and is not taken for a smaller gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from gradiometer import wire
from gradiometer_server.alerting.explain import explain
from gradiometer_server.alerting.rules.replica_mismatch import ReplicaMismatchDefaults
from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.folded import FoldedLayers, ReplicaMismatch
from gradiometer_server.fold.coverage import Coverage, CoverageCheck, totals_told, without_withheld
from gradiometer_server.fold.ranks import LayerMerger
from tests.unit.server.alerting_timeline import LAYERS, healthy_step, layers, only, run

FULL = [4.0, 2.0, 4.0, -1.0, 1.0, 0.0, 0.0]
NONE = [0.0] * 7
UNREAD = [0.0, 0.0, math.nan, 0.0, 0.0, 0.0, 0.0]


def layer(name: str, *, numel: int = 8, shard: tuple[int, ...] = (), num_shards: int = 1) -> wire.Layer:
    return wire.Layer(name=name, shape=(numel,), numel=numel, shard=shard, num_shards=num_shards)


def sharded(name: str, rank: int) -> wire.Layer:
    return layer(name, shard=(rank,), num_shards=2)


def judge(
    schemas: dict[tuple[int, int], list[wire.Layer]], rows: dict[tuple[int, int], list[list[float]]]
) -> Coverage:
    declared = {
        writer: wire.LayerSchema(schema_id=writer[1], layers=tuple(found))
        for writer, found in schemas.items()
    }
    numels = {one.name: one.numel for found in schemas.values() for one in found}
    partials: dict[tuple[int, int], NDArray[np.float64]] = {
        writer: np.array(found) for writer, found in rows.items()
    }
    present = {writer: declared[writer] for writer in rows}
    merged = LayerMerger(tuple(numels), present).merge(partials)
    check = CoverageCheck(tuple(numels), tuple(numels.values()), declared, tuple(rows))
    return check.of(partials, merged.partials_MP)


def withheld(coverage: Coverage) -> list[bool]:
    return [] if coverage.withheld_M is None else coverage.withheld_M.tolist()


TWO = {(rank, 1): [sharded("a", rank), sharded("b", rank)] for rank in range(2)}


def test_all_shards_make_the_whole() -> None:
    assert judge(TWO, {(0, 1): [FULL, FULL], (1, 1): [FULL, FULL]}) == Coverage(fraction=1.0, withheld_M=None)


def test_a_rank_that_says_nothing_leaves_its_shards_out() -> None:
    coverage = judge(TWO, {(0, 1): [FULL, FULL]})
    assert (coverage.fraction, withheld(coverage), coverage.num_incomplete) == (0.5, [True, True], 2)


def test_a_layer_without_gradient_is_not_missing() -> None:
    assert judge(TWO, {(0, 1): [FULL, NONE], (1, 1): [FULL, NONE]}).fraction == 1.0


def test_a_shard_without_gradient_is_not_missing() -> None:
    """An expert that got no tokens, or a rank that holds no element of a small layer."""
    assert judge(TWO, {(0, 1): [FULL, FULL], (1, 1): [FULL, NONE]}).fraction == 1.0


def test_a_gradient_that_cannot_be_read_is_withheld_and_no_fault_of_a_rank() -> None:
    coverage = judge(TWO, {(0, 1): [FULL, UNREAD], (1, 1): [FULL, UNREAD]})
    assert (coverage.fraction, withheld(coverage), coverage.num_incomplete) == (0.5, [False, True], 0)


def test_elements_that_do_not_add_up_are_told() -> None:
    """Both ranks say that they hold all of it, but each read a half."""
    wrong = {(rank, 1): [layer("a")] for rank in range(2)}
    coverage = judge(wrong, {(0, 1): [FULL], (1, 1): [FULL]})
    assert (coverage.fraction, withheld(coverage), coverage.num_incomplete) == (0.5, [True], 1)


def test_replicas_make_up_for_a_rank_that_says_nothing() -> None:
    replicas = {(rank, 1): [layer("a", numel=4)] for rank in range(2)}
    assert judge(replicas, {(1, 1): [FULL]}).fraction == 1.0


def test_a_stage_that_says_nothing_leaves_its_layers_out() -> None:
    stages = {(0, 1): [layer("a", numel=4)], (1, 1): [layer("b", numel=4)]}
    coverage = judge(stages, {(0, 1): [FULL]})
    assert (coverage.fraction, withheld(coverage)) == (0.5, [False, True])


def test_an_optimizer_that_rests_is_not_missing() -> None:
    both = {(rank, watch): [sharded(f"w{watch}", rank)] for rank in range(2) for watch in (1, 2)}
    assert judge(both, {(0, 1): [FULL], (1, 1): [FULL]}).fraction == 1.0
    coverage = judge(both, {(0, 1): [FULL], (1, 1): [FULL], (0, 2): [FULL]})
    assert withheld(coverage) == [False, True]


def test_the_newest_declaration_of_a_rank_counts() -> None:
    """At first the gradient was not there, and the parameter's own placement was declared."""
    declared = {(rank, 1): [sharded("a", rank)] for rank in range(2)}
    declared |= {(rank, 2): [layer("a", numel=4)] for rank in range(2)}
    assert judge(declared, {(rank, 2): [FULL] for rank in range(2)}).fraction == 1.0


def test_what_a_missing_part_cannot_change_is_kept() -> None:
    coverage = Coverage(fraction=0.5, withheld_M=np.array([True, True, False]))
    statistics = {
        "norm": np.array([1.0, math.nan, 2.0]),
        "num_nonfinite": np.array([0.0, 3.0, 0.0]),
    }
    kept = without_withheld(statistics, coverage)
    assert is_absent(kept["norm"]).tolist() == [True, False, False]
    assert math.isnan(kept["norm"][1])
    assert is_absent(kept["num_nonfinite"]).tolist() == [True, False, False]
    totals = {"grad/norm": 1.0, "grad/abs_max": math.inf, "grad/num_nonfinite": 3.0}
    told = {"grad/abs_max": math.inf, "grad/num_nonfinite": 3.0, "grad/coverage_fraction": 0.5}
    assert totals_told(totals, coverage, num_ranks=1) == told


def test_the_coverage_of_several_ranks_is_a_metric() -> None:
    whole = Coverage(fraction=1.0, withheld_M=None)
    assert totals_told({"grad/norm": 1.0}, whole, num_ranks=1) == {"grad/norm": 1.0}
    assert totals_told({"grad/norm": 1.0}, whole, num_ranks=2)["grad/coverage_fraction"] == 1.0
    assert totals_told({}, whole, num_ranks=2) == {}


# -- alerts ----------------------------------------------------------------------------------------------------


def with_(item: FoldedLayers, **changed: object) -> FoldedLayers:
    fields = {name: getattr(item, name) for name in item.__slots__}
    return FoldedLayers(**{**fields, **changed})


@pytest.mark.parametrize(("other", "severity"), [(4.00001, "warning"), (9.0, "error"), (math.nan, "error")])
def test_replicas_that_differ_raise_one_alert(other: float, severity: str) -> None:
    found = ReplicaMismatch(layer=LAYERS[2], ranks=(0, 3), sum_squares=(4.0, other))
    items = [with_(layers(step), mismatch=found if 5 <= step <= 30 else None) for step in range(1, 60)]
    episode = only(items)
    assert (episode.first.step, episode.severity.value, episode.layers) == (5, severity, (LAYERS[2],))
    assert episode.state.value == "resolved"
    text = explain(episode)
    assert text.title == f"Ranks 0 and 3 hold different gradients of {LAYERS[2]} at step 5"
    assert "rank 3 has a gradient of norm" in text.explanation
    assert ReplicaMismatchDefaults().repeat_steps < ReplicaMismatchDefaults().quiet_steps


def test_a_rank_that_stays_away_raises_an_alert_but_one_step_does_not() -> None:
    def item(step: int, *, missing: bool) -> FoldedLayers:
        changed = {"coverage": 0.75, "num_incomplete": 5, "missing_ranks": (2,)} if missing else {}
        return with_(layers(step), **changed)

    assert run([item(step, missing=step % 3 != 0) for step in range(1, 40)]) == {}
    episode = only([item(step, missing=step > 10) for step in range(1, 60)])
    assert (episode.first.step, episode.ranks, episode.state.value) == (13, (2,), "firing")
    text = explain(episode)
    assert text.title.startswith("Only 75 % of the gradient is reported")
    assert "rank 2" in text.explanation


def test_a_layer_that_cannot_be_read_is_not_called_dead() -> None:
    hidden = np.array([True, False, False, False, False])
    items = [with_(layers(step, [None, 1, 1, 1, 1]), withheld=hidden) for step in range(1, 60)]
    assert run(items) == {}
    assert only([layers(step, [None, 1, 1, 1, 1]) for step in range(1, 60)]).first.rule == "dead_layer"


@pytest.mark.parametrize("norm", [1656.0, 0.025], ids=["ZeRO-0", "ZeRO-3"])
def test_R19_the_size_of_a_norm_is_no_spike(norm: float) -> None:
    """Two runs with the same loss whose norms differ by 66,000: each is judged by its own past."""
    items = [
        item for step in range(1, 300) for item in healthy_step(step, norm=norm * (1 + 0.05 * math.sin(step)))
    ]
    assert run(items) == {}
    spike = healthy_step(300, norm=100 * norm)
    assert only([*items, *spike]).first.rule == "grad_norm_spike"
