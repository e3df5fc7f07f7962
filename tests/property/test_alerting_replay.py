"""Alerting is deterministic: cutting a timeline anywhere and continuing from the snapshot changes nothing.

And it is quiet: curves that are only noisy raise no alert.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradiometer_server.alerting.engine import AlertEngine
from gradiometer_server.domain.alerts import Episode
from gradiometer_server.domain.folded import Folded, FoldedBlock, FoldedScalars
from tests.unit.server.alerting_timeline import LAYERS, event, layers, run, scalars

SUBSETS = st.sets(st.sampled_from(LAYERS))


@st.composite
def steps(draw: st.DrawFn, step: int) -> list[Folded]:
    """One step of a sick run, its parts in any order."""
    kind = draw(st.sampled_from(["healthy"] * 6 + ["spike", "nan", "overflow", "silent"]))
    bad = draw(SUBSETS) if kind in ("nan", "overflow") else set()
    zero = draw(SUBSETS) - bad if kind == "silent" else set()
    norm = {"spike": draw(st.sampled_from([4.0, 20.0, 500.0])), "nan": math.nan, "overflow": math.inf}.get(
        kind, 1.0
    )
    loss = draw(st.sampled_from([math.nan, math.inf])) if kind == "nan" else 2.0
    items: list[Folded] = [
        layers(
            step,
            [norm if math.isfinite(norm) else 1.0] * len(LAYERS),
            nonfinite=dict.fromkeys(bad, 1),
            zero=zero,
        ),
        scalars(step, {"grad/norm": norm}),
        scalars(step, {"train/loss": loss}, by_rank={"train/loss": {0: 2.0, 1: loss}}),
        scalars(
            step,
            {"scaler/skipped": float(kind == "overflow"), "scaler/scale": draw(st.sampled_from([0.5, 64.0]))},
        ),
    ]
    if kind == "nan" and draw(st.booleans()):
        return [event(step, "nonfinite_activation", modules=["blocks.0"]), *draw(st.permutations(items))]
    return list(draw(st.permutations(items)))


@st.composite
def timelines(draw: st.DrawFn) -> list[Folded]:
    calm = [
        item
        for step in range(1, 41)
        for item in (layers(step), scalars(step, {"grad/norm": 1.0, "train/loss": 2.0}))
    ]
    return calm + [item for step in range(41, 41 + draw(st.integers(1, 40))) for item in draw(steps(step))]


def same(left: dict[str, Episode], right: dict[str, Episode]) -> bool:
    return repr(left) == repr(right)  # repr, because NaN is not equal to itself


METRICS = (
    "train/loss",
    "aux_loss",
    "eval/loss",
    "grad/norm",
    "train/lr",
    "scaler/scale",
    "scaler/skipped",
    "x",
)
LEVELS = st.sampled_from(
    [0.0, 1.0, 1.02, 0.98, 1.3, 2.0, 9.0, 400.0, -1.0, 1e308, -1e308, math.nan, math.inf]
)


@st.composite
def curves(draw: st.DrawFn) -> list[Folded]:
    """Scalars only: stretches of usual noise, odd values between them, gaps, steps that go back, other attempts."""
    items: list[Folded] = []
    step, attempt = draw(st.sampled_from([0, 5000])), 1
    for stretch in range(draw(st.integers(1, 4))):
        random = np.random.default_rng(draw(st.integers(0, 3)))
        names = draw(st.sets(st.sampled_from(METRICS), min_size=1))
        gap, level = draw(st.sampled_from([1, 1, 7, 100])), draw(LEVELS)
        for _ in range(draw(st.sampled_from([3, 20, 90, 250]))):
            step += gap
            items.append(
                scalars(
                    step,
                    {name: level + 0.03 * random.standard_normal() for name in sorted(names)},
                    attempt=attempt,
                )
            )
        for value in draw(st.lists(LEVELS, max_size=6)):
            step += gap
            items.append(scalars(step, dict.fromkeys(sorted(names), value), attempt=attempt))
        if draw(st.integers(0, 5)) == 0:
            step, attempt = max(0, step - 50), attempt + (stretch % 2)
    return items


@settings(deadline=None, max_examples=60)
@given(curves(), st.data())
def test_a_replay_of_curves_gives_the_same_episodes(items: list[Folded], data: st.DataObject) -> None:
    whole = run(items)
    cut = data.draw(st.integers(0, len(items)))
    before = AlertEngine.restore([], [])
    stored = run(items[:cut], before)
    after = AlertEngine.restore(before.snapshot(), list(stored.values()))
    assert same(whole, stored | run(items[cut:], after))
    assert after.snapshot() == _snapshot_of(items)


def _snapshot_of(items: list[Folded]) -> list[tuple[str, str, bytes]]:
    engine = AlertEngine.restore([], [])
    run(items, engine)
    return engine.snapshot()


@settings(deadline=None, max_examples=60)
@given(curves(), st.data())
def test_steps_that_come_as_one_block_give_the_same_episodes(
    items: list[Folded], data: st.DataObject
) -> None:
    """A block stands for scalars of rising steps with the same names."""
    blocks: list[Folded] = []
    rows: list[FoldedScalars] = []
    for item in items:
        assert isinstance(item, FoldedScalars)
        alike = rows and item.attempt == rows[-1].attempt and list(item.values) == list(rows[-1].values)
        if not alike or item.step <= rows[-1].step:
            blocks += _block(rows)
            rows = []
        rows.append(item)
    blocks += _block(rows)
    singly, at_once = AlertEngine.restore([], []), AlertEngine.restore([], [])
    assert same(run(items, singly), run(blocks, at_once))
    assert at_once.snapshot() == singly.snapshot()


def _block(rows: list[FoldedScalars]) -> list[Folded]:
    if not rows:
        return []
    return [
        FoldedBlock(
            attempt=rows[0].attempt,
            names=tuple(rows[0].values),
            steps_S=np.array([row.step for row in rows], np.int64),
            times_S=np.array([row.time_s for row in rows]),
            values_SC=np.array([list(row.values.values()) for row in rows]),
        )
    ]


@settings(deadline=None, max_examples=60)
@given(timelines(), st.data())
def test_a_replay_from_any_snapshot_gives_the_same_episodes(items: list[Folded], data: st.DataObject) -> None:
    whole = run(items)
    cut = data.draw(st.integers(0, len(items)))
    before = AlertEngine.restore([], [])
    stored = run(items[:cut], before)
    states, episodes = before.snapshot(), list(stored.values())
    for _ in range(2):  # The second time is the replay after a crash that came before the commit.
        after = AlertEngine.restore(states, episodes)
        assert same(whole, stored | run(items[cut:], after))


@settings(deadline=None, max_examples=30)
@given(timelines())
def test_episodes_are_well_formed(items: list[Folded]) -> None:
    for episode in run(items).values():
        assert episode.first.step <= episode.last_step
        assert 1 <= episode.count <= episode.last_step - episode.first.step + 1
        assert len(set(episode.layers)) == len(episode.layers)
        assert not episode.layers or episode.num_layers >= 1


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_language_model_run_raises_nothing(seed: int) -> None:
    """4,000 steps: warm-up, log-normal noise of 15 % in the norm, slow decay, a skip of the scaler now and then."""
    random = np.random.default_rng(seed)
    engine = AlertEngine.restore([], [])
    share = random.dirichlet(np.ones(len(LAYERS)))
    found: dict[str, Episode] = {}
    for step in range(1, 4001):
        level = (6.0 * math.exp(-step / 120) + 0.4) * (1 + 0.3 * math.exp(-step / 2000))
        norm = level * math.exp(0.15 * random.standard_normal())
        noise_L = np.exp(0.1 * random.standard_normal(len(LAYERS)))
        loss = 2.8 + 8.0 * math.exp(-step / 300) + 0.05 * random.standard_normal()
        skipped = step <= 4 or step % 997 == 0
        items = [
            layers(step, list(norm * np.sqrt(share) * noise_L)),
            scalars(step, {"grad/norm": math.inf if skipped else norm}),
            scalars(step, {"train/loss": loss, "train/lr": 3e-4 * min(step / 400, 1.0), "time/step_s": 0.1}),
            scalars(step, {"scaler/skipped": float(skipped), "scaler/scale": 2.0 ** (12 if skipped else 13)}),
        ]
        if skipped:
            items[0] = layers(step, [norm] * len(LAYERS), nonfinite={"head.weight": 1})
        found |= run(items, engine)
    assert found == {}
