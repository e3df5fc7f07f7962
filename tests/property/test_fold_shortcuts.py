"""What is folded many steps or many ranks at a time gives the same bits as one step, one rank after the other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gradiometer import wire
from gradiometer_server.alerting.engine import AlertEngine
from gradiometer_server.domain.folded import Folded, FoldedBlock, FoldedScalars
from gradiometer_server.domain.live import PointsUpdate
from gradiometer_server.fold import run_fold
from gradiometer_server.fold.alike import AlikeRanks
from gradiometer_server.fold.points import Points, live_points, points_of
from gradiometer_server.fold.ranks import LayerMerger
from gradiometer_server.fold.run_fold import FoldSource, RunFold
from gradiometer_server.fold.times import MAX_STEPS, StepTimes
from gradiometer_server.fold.watermark import KeptBound, Watermark

NAMES = ("train/loss", "train/lr", "eval/other", "time/step_s", "grad/norm", "scaler/scale")
usual = st.floats(0.5, 2.0)
values = st.one_of(usual, usual, usual, usual, st.sampled_from([math.nan, math.inf, 0.0, 1e300]))


@st.composite
def streams(draw: st.DrawFn) -> list[wire.Record]:
    """Frames of one rank: some of many rising steps, some of few, some that go back."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    plain = draw(st.booleans())
    records: list[wire.Record] = [
        wire.ScalarSchema(schema_id=1, columns=tuple(wire.Column(name) for name in names))
    ]
    step = 0
    for _ in range(draw(st.integers(1, 6))):
        step = max(0, step + draw(st.integers(-20, 3)))
        count = draw(st.sampled_from([1, 3, run_fold.BLOCK_STEPS, 3 * run_fold.BLOCK_STEPS]))
        steps = tuple(range(step, step + count))
        shape = (count, len(names))
        seed = draw(st.integers(0, 2**32 - 1))
        block_SC = np.random.default_rng(seed).uniform(0.5, 2.0, shape)
        if not plain:
            for _ in range(draw(st.integers(0, 3))):
                block_SC[draw(st.integers(0, count - 1)), draw(st.integers(0, len(names) - 1))] = draw(values)
        times = tuple(100.0 + one for one in steps)
        records.append(wire.Frame(schema_id=1, steps=steps, times=times, values=block_SC.tobytes()))
        step += count
    return records


def fold(records: list[wire.Record], block_steps: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What a run's store, rules and browsers get of these records."""
    monkeypatch.setattr(run_fold, "BLOCK_STEPS", block_steps)
    one = RunFold(make_layout=lambda names, numels: pytest.fail("there are no layers"))
    one.add_source(FoldSource(source_id=1, ordinal=1, rank=0, world_size=1), 0.0)
    engine = AlertEngine.restore([], [])
    stored: dict[str, list[tuple[int, bytes]]] = {}
    shown: dict[str, list[tuple[int, bytes]]] = {}
    episodes: dict[str, Any] = {}
    for seq, record in enumerate(records, 1):
        items = one.apply(1, seq, record, 0.0)
        for item in items:
            episodes.update((episode.alert_id, episode) for episode in engine.observe(item))
        for point in points_of(items, one.take_times()):
            is_many = isinstance(point, Points)
            steps = point.steps_N.tolist() if is_many else [point.step]
            found = point.values_N if is_many else np.array([point.values])
            stored.setdefault(point.name.key, []).extend(zip(steps, map(bytes, found), strict=True))
        live = live_points("r", items) or PointsUpdate(run_id="r")
        for key, points in live.series.items():
            shown.setdefault(key, []).extend((step, np.float64(value).tobytes()) for step, value in points)
    # As text: in an episode that is about a NaN that value is not equal to itself.
    return stored, shown, repr(episodes), engine.snapshot()


@settings(deadline=None, max_examples=60)
@given(records=streams())
def test_a_block_of_steps_is_stored_shown_and_judged_as_its_steps_are(records: list[wire.Record]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps = fold(records, 2**60, monkeypatch)
        blocks = fold(records, 16, monkeypatch)
    for one, other, what in zip(steps, blocks, ("stored", "shown", "episodes", "rules"), strict=True):
        assert one == other, what


def test_a_usual_block_is_not_taken_apart() -> None:
    engine = AlertEngine.restore([], [])
    assert engine.observe(FoldedScalars(attempt=1, step=0, time_s=0.0, values={})) == []
    seen: list[Folded] = []
    engine._rules[0].observe = lambda item, history: seen.append(item) or []  # type: ignore[method-assign, func-returns-value]
    block = FoldedBlock(
        attempt=1,
        names=("train/loss",),
        steps_S=np.arange(1, 1001),
        times_S=np.arange(1000.0),
        # A loss that falls: one that never learns is an alert.
        values_SC=np.linspace(2.0, 1.0, 1000)[:, None],
    )
    assert engine.observe(block) == []
    assert [item.step for item in seen if isinstance(item, FoldedScalars)] == [1, 999, 1000]


def partials(rng: np.random.Generator, num_layers: int) -> NDArray[np.float64]:
    """One rank's (L, P), with all that can be in them."""
    found_LP = np.exp(rng.normal(0, 5, (num_layers, 7)))
    found_LP[:, 0] = 16
    found_LP[:, 1] *= rng.choice([-1.0, 1.0], num_layers)
    found_LP[:, 5:] = rng.integers(0, 3, (num_layers, 2))
    odd = rng.integers(0, 8, num_layers)
    found_LP[odd == 0, 0] = 0.0
    found_LP[odd == 1, 2] = math.nan
    found_LP[odd == 2, 4] = math.inf
    found_LP[odd == 3, 1] = -0.0
    found_LP[odd == 4, 6] = 0.0
    return found_LP


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_layers=st.integers(1, 5),
    num_shards=st.sampled_from([1, 2, 8]),
    num_ranks=st.integers(4, 16),
    differ=st.booleans(),
)
def test_ranks_that_are_alike_merge_to_the_same_bits_at_once(
    seed: int, num_layers: int, num_shards: int, num_ranks: int, differ: bool
) -> None:
    rng = np.random.default_rng(seed)
    names = [f"layer{index}" for index in rng.permutation(num_layers)]
    schemas, said = {}, {}
    of_shard = [partials(rng, num_layers) for _ in range(num_shards)]
    for rank in range(num_ranks):
        at = rank % num_shards
        shard = (at,) if num_shards > 1 else ()
        layers = tuple(
            wire.Layer(f"layer{i}", (16 * num_shards,), 16 * num_shards, shard, num_shards)
            for i in range(num_layers)
        )
        schemas[rank, 1] = wire.LayerSchema(schema_id=1, layers=layers)
        said[rank, 1] = of_shard[at].copy()
        if differ and rng.random() < 0.3:
            said[rank, 1][rng.integers(num_layers), 2] *= 1.5
    at_once, one_by_one = LayerMerger(names, schemas), LayerMerger(names, schemas)
    assert at_once._alike is not None
    one_by_one._alike = None
    found, expected = at_once.merge(said), one_by_one.merge(said)
    assert found.partials_MP.tobytes() == expected.partials_MP.tobytes()
    assert list(found.num_nonfinite_by_rank) == list(expected.num_nonfinite_by_rank)
    for rank, bad_M in expected.num_nonfinite_by_rank.items():
        assert found.num_nonfinite_by_rank[rank].tolist() == bad_M.tolist()
    assert at_once.mismatch(said) == one_by_one.mismatch(said)


def test_ranks_that_hold_different_layers_are_not_alike() -> None:
    rows = {(rank, 1): np.arange(2) for rank in range(8)}
    none = {(rank, 1): np.empty(0, np.intp) for rank in range(8)}
    assert AlikeRanks.of(rows, rows, none) is not None
    assert AlikeRanks.of(rows, {**rows, (3, 1): np.array([1, 0])}, none) is None
    assert AlikeRanks.of({**rows, (3, 1): np.array([1])}, rows, none) is None
    assert AlikeRanks.of(rows, rows, {**none, (3, 1): np.array([1])}) is None


events = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "declare", "close", "expect", "later"]),
        st.integers(0, 4),
        st.integers(0, 6),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@given(said=events)
def test_a_kept_bound_is_the_bound(said: list[tuple[str, int, int]]) -> None:
    mark = Watermark(world_size=2, silence_s=10.0)
    emit, final = KeptBound(), KeptBound(is_final=True)
    declared: set[int] = set()
    last_step: dict[int, int] = {}
    now_s = 0.0
    for what, rank, number in said:
        if what == "later":
            now_s += number
        elif what == "expect":
            mark.expect(number)
        elif what == "close":
            mark.close(rank, now_s)
        elif what == "declare":
            declared.add(rank)
            mark.heard(rank, now_s)
        else:
            last_step[rank] = max(last_step.get(rank, -1), number)
            mark.heard(rank, now_s, step=last_step[rank])
        progress = {one: last_step.get(one, -1) for one in declared}
        assert emit.below(mark, now_s, declared, last_step) == mark.emit_below(now_s, progress)
        assert final.below(mark, now_s, declared, last_step) == mark.final_below(progress)


def test_times_of_many_steps_are_those_of_each() -> None:
    at_once, one_by_one = StepTimes(), StepTimes()
    for begin, end in ((0, 100), (50, 5000), (100, 200), (5000, 9000), (0, 10)):
        steps, times = range(begin, end), [1000.0 - begin + step for step in range(begin, end)]
        at_once.report_all(steps, times)
        for step, time_s in zip(steps, times, strict=True):
            one_by_one.report(step, time_s)
        changed, expected = at_once.take_changed(), one_by_one.take_changed()
        # What is forgotten within one frame is all that may differ.
        newest = sorted(expected)[-MAX_STEPS // 2 :]
        assert {step: changed[step] for step in newest} == {step: expected[step] for step in newest}
        assert set(changed) == set(expected)
