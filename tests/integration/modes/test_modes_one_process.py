"""One process: what is recorded is the gradient of a plain model, and the training does not notice."""

from __future__ import annotations

import math

import pytest

from gradiometer.capture.statistics import COUNT, SUM_SQUARES
from tests.integration.modes import mode_checks, one_process_modes
from tests.integration.modes.loop_modes import BAD_STEP, CLIPS, OPTIMIZERS, SCALE
from tests.integration.modes.one_process_modes import MODES

STEPS = [1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all modes of one process were played, in one process."""
    folder = tmp_path_factory.mktemp("modes")
    mode_checks.launch(one_process_modes.__name__, MODES, folder)
    return folder


@pytest.fixture
def play(folder):
    by_name = {mode.name: mode for mode in MODES}
    return lambda name: mode_checks.played(by_name[name], folder)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_mode(mode, folder):
    mode_checks.check(mode_checks.played(mode, folder))


def norms(result):
    """Norm of the whole true gradient by step."""
    return {
        step: math.sqrt(sum(row[SUM_SQUARES] for row in rows.values()))
        for step, rows in result.expected.items()
    }


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_step_is_told_and_the_norm_of_clipping_has_its_scale_in_its_name(kind, clip, play):
    result = play(f"GradScaler, {kind} optimizer, {clip}")
    points = result.out[0].points
    assert points["scaler/skipped"] == {step: float(step == BAD_STEP) for step in STEPS}
    assert points["scaler/scale"] == {1: SCALE, 2: SCALE, 3: SCALE / 2}
    true = norms(result)
    factors = {"clipped after unscale": (1.0,) * 3, "clipped before unscale": (SCALE, SCALE, SCALE / 2)}
    for name, of in (("grad/clip_norm", "after"), ("grad/clip_norm_scaled", "before")):
        if of not in clip:
            assert name not in points
            continue
        expected = [
            true[step] * factor if step != BAD_STEP else math.inf
            for step, factor in zip(STEPS, factors[clip], strict=True)
        ]
        assert list(points[name].values()) == pytest.approx(expected, rel=1e-5)


def test_a_step_of_two_optimizers_counts_as_skipped_if_one_was(play):
    points = play("two optimizers and a GradScaler, one step").out[0].points
    assert points["scaler/skipped"] == {step: float(step == BAD_STEP) for step in STEPS}


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("two optimizers, one step", {"": 1e-2, "/group1": 1e-2, "/group2": 1e-3}),
        ("two optimizers by name, one step", {"/matrices": 1e-2, "/rest": 1e-2, "/rest/group1": 1e-3}),
    ],
)
def test_optimizers_of_one_step_have_one_clock_one_clip_norm_and_all_rates(name, rates, play):
    result = play(name)
    points = result.out[0].points
    assert points["grad/clip_norm"] == pytest.approx(norms(result), rel=1e-5)
    assert {metric: set(values.values()) for metric, values in points.items() if "train/lr" in metric} == {
        f"train/lr{suffix}": {rate} for suffix, rate in rates.items()
    }
    assert list(points["time/step_s"]) == STEPS[1:]
    # Logged after the first optimizer stepped, and again after the second: the same step.
    assert list(points["train/loss"]) == STEPS


def test_of_two_models_each_has_its_steps(play):
    for order in ("first", "last"):
        out = play(f"two models in turn, the clock's {order}").out[0]
        assert list(out.layers["head.weight"]) == list(out.layers["critic.head.weight"]) == STEPS
        assert list(out.points["train/lr"]) == list(out.points["train/lr/critic"]) == STEPS


def test_a_step_in_the_backward_pass_ends_with_it(play):
    result = play("optimizer in backward, one per parameter")
    # In the first step nobody knows yet that `never` and `sometimes` will not step.
    assert result.notes["steps"] == [0, 2, 3]
    out = result.out[0]
    assert "per parameter, pre-clip" in out.unavailable()["grad/clip_norm"]
    assert [out.layers["sometimes.weight"][step][COUNT] for step in STEPS] == [0, 49, 0]
    assert [out.layers["never.weight"][step][COUNT] for step in STEPS] == [0, 0, 0]
