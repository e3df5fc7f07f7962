"""The rules on losses, norms, loss scale and learning rate: what fires them, when, and what must not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest

from gradiometer_server.alerting.explain import explain
from gradiometer_server.domain.alerts import Episode, Severity
from gradiometer_server.domain.folded import Folded
from tests.unit.server.alerting_timeline import run, scalars

SEEDS = [0, 1, 2]


def curve(
    num_steps: int,
    *,
    seed: int = 0,
    first: int = 0,
    every: int = 1,
    noise: float = 0.03,
    change: Callable[[int, dict[str, float]], None] | None = None,
) -> list[Folded]:
    """A usual training: a falling loss, a norm with log-normal noise, a warm-up and a cosine of the learning rate."""
    random = np.random.default_rng(seed)
    items: list[Folded] = []
    for index in range(num_steps):
        step = first + index * every
        values = {
            "train/loss": 2.5 + 4.0 * math.exp(-index / 150) + noise * random.standard_normal(),
            "grad/norm": (0.5 + math.exp(-index / 100)) * math.exp(0.12 * random.standard_normal()),
            "train/lr": 3e-4 * min((index + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * index / num_steps)),
        }
        if change is not None:
            change(index, values)
        items.append(scalars(step, values))
    return items


def losses(values: Iterable[float], *, first: int = 0, every: int = 1, **others: float) -> list[Folded]:
    return [
        scalars(first + index * every, {"train/loss": value, **others}) for index, value in enumerate(values)
    ]


def of(found: Mapping[str, Episode], rule: str) -> list[Episode]:
    return [episode for episode in found.values() if episode.first.rule == rule]


def add(metric: str, at: Mapping[int, float]) -> Callable[[int, dict[str, float]], None]:
    def change(index: int, values: dict[str, float]) -> None:
        values[metric] += at.get(index, 0.0)

    return change


# loss_spike ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("every", [1, 100])
def test_a_loss_far_beyond_anything_before_is_a_warning_at_once(seed: int, every: int) -> None:
    items = curve(400, seed=seed, every=every, change=add("train/loss", {300: 3.0}))
    (episode,) = run(items).values()
    assert (episode.first.rule, episode.first.step, episode.count) == ("loss_spike", 300 * every, 1)
    assert episode.severity is Severity.WARNING
    assert f"step {300 * every}" in explain(episode).title


@pytest.mark.parametrize("seed", SEEDS)
def test_one_hard_batch_is_an_info_and_a_second_at_once_a_warning(seed: int) -> None:
    (alone,) = run(curve(400, seed=seed, change=add("train/loss", {300: 0.4}))).values()
    assert (alone.severity, alone.count) == (Severity.INFO, 1)
    (twice,) = run(curve(400, seed=seed, change=add("train/loss", {300: 0.4, 301: 0.4}))).values()
    assert (twice.severity, twice.count) == (Severity.WARNING, 2)


def test_a_loss_that_stays_up_is_one_episode_and_an_error() -> None:
    items = curve(500, change=add("train/loss", dict.fromkeys(range(300, 340), 3.0)))
    (episode,) = of(run(items), "loss_spike")
    assert (episode.severity, episode.count, episode.last_step) == (Severity.ERROR, 40, 339)


def test_a_run_with_hard_batches_gets_used_to_them() -> None:
    """Each 40th batch is much harder: after the first few that is what is usual."""
    found = run(curve(4000, change=add("train/loss", dict.fromkeys(range(0, 4000, 40), 0.8))))
    assert len(found) <= 1
    assert all(episode.severity is Severity.INFO for episode in found.values())


def test_a_loss_around_zero_is_judged_by_its_own_noise() -> None:
    random = np.random.default_rng(0)
    values = 0.05 * random.standard_normal(400)
    assert run(losses(values)) == {}
    values[300] = 2.0
    (episode,) = run(losses(values)).values()
    assert (episode.first.step, episode.severity) == (300, Severity.WARNING)


def test_without_history_only_the_unheard_of_is_told_and_only_in_a_run_that_is_on_its_way() -> None:
    values = [2.20, 2.22, 2.19, 2.35, 5.10, 3.49]
    norms = [0.24, 0.95, 0.4, 0.3, 960.0, 350.0]

    def rows(first: int, norms: Iterable[float]) -> list[Folded]:
        pairs = zip(values, norms, strict=True)
        return [
            scalars(first + index, {"train/loss": loss, "grad/norm": norm})
            for index, (loss, norm) in enumerate(pairs)
        ]

    (episode,) = of(run(rows(31_214, norms)), "loss_spike")
    assert (episode.first.step, episode.severity) == (31_218, Severity.WARNING)
    assert run(rows(0, norms)) == {}  # At the very start that may be how it begins.
    assert run(rows(31_214, [0.3] * 6)) == {}  # The gradient does not back it: a few values say little.
    assert run(losses(values, first=31_214)) == {}
    longer = [2.3, 2.25, 2.31, 2.28, *values]
    (episode,) = run(losses(longer, first=31_214)).values()
    assert (episode.first.step, episode.severity) == (31_222, Severity.WARNING)
    assert run(losses([11.5, 11.3, 11.2, 11.0, 10.9], first=445, every=50)) == {}


def test_a_change_of_the_interval_resets_what_is_usual() -> None:
    """100 quiet rows of one step each, then one row each 500 steps, much noisier."""
    random = np.random.default_rng(3)
    rows = losses(5.0 + 0.01 * random.standard_normal(100))
    rows += losses(4.0 + 0.8 * random.standard_normal(60), first=600, every=500)
    assert of(run(rows), "loss_spike") == []


def test_a_restart_of_the_schedule_resets_what_is_usual() -> None:
    def change(index: int, values: dict[str, float]) -> None:
        values["train/lr"] = 1e-3 * (1 - (index % 300) / 301)
        values["train/loss"] += 0.6 * math.exp(-(index % 300) / 30) if index >= 300 else 0.0

    assert run(curve(900, change=change)) == {}


def test_other_losses_have_episodes_of_their_own_and_a_weight_is_no_loss() -> None:
    def change(index: int, values: dict[str, float]) -> None:
        values["train/aux_loss"] = 1.0 + 0.01 * math.sin(index * 7.7) + 5.0 * (index == 200)
        values["train/loss_weight"] = 1.0 + 9.0 * (index == 200)

    (episode,) = run(curve(300, change=change)).values()
    assert episode.first.key == episode.first.metric == "train/aux_loss"


# loss_divergence, loss_rise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_drift_is_found(seed: int) -> None:
    items = curve(1000, seed=seed, change=lambda index, values: values.update(_drift(index, values)))
    (episode,) = of(run(items), "loss_divergence")
    assert 560 < episode.first.step < 700
    assert episode.severity is Severity.ERROR
    assert "above its best" in explain(episode).title


def _drift(index: int, values: Mapping[str, float]) -> dict[str, float]:
    return {"train/loss": values["train/loss"] + 0.005 * max(0, index - 500)}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_up_that_has_ended_is_no_divergence(seed: int) -> None:
    found = run(curve(1500, seed=seed, change=add("train/loss", dict.fromkeys(range(600, 1500), 0.25))))
    assert {episode.first.rule for episode in found.values()} <= {"loss_spike"}
    assert len(found) <= 1


def test_a_creeping_rise_in_a_sparse_log_is_told() -> None:
    """Scenario R75: one row a day; after a resume the loss goes up by a tenth within two days. Calm before."""
    calm = [3.1, 2.95, 2.9, 2.84, 2.8, 2.77, 2.71, 2.68, 2.66, 2.61, 2.6, 2.57, 2.54, 2.55, 2.5, 2.51]
    calm += [2.49, 2.47, 2.48, 2.45, 2.46, 2.44, 2.45]
    assert run(losses(calm, first=1)) == {}
    (episode,) = run(losses([*calm, 2.58, 2.72, 2.70, 2.69, 2.71, 2.68, 2.70], first=1)).values()
    assert (episode.first.rule, episode.severity) == ("loss_rise", Severity.INFO)
    assert episode.first.step <= 29


# loss_zero, grad_zero, never_learned --------------------------------------------------------------------------------


def test_a_loss_that_falls_to_exactly_zero_is_no_success() -> None:
    """Scenario R24: the loss becomes exactly 0 and the norm sits at the clip value."""
    falling = [1.2 - 0.001 * step for step in range(300)]
    found = run(losses([*falling, *[0.0] * 100], **{"grad/norm": 1.0}))
    (episode,) = found.values()
    assert (episode.first.rule, episode.severity) == ("loss_zero", Severity.ERROR)
    assert 300 <= episode.first.step < 310
    assert episode.count > 5


def test_a_zero_loss_with_a_norm_that_is_no_number_is_masked() -> None:
    found = run(losses([0.0] * 13, first=17, **{"grad/norm": math.nan}))
    assert {episode.first.rule for episode in found.values()} == {"loss_zero", "non_finite"}
    (episode,) = of(found, "loss_zero")
    assert "logging_nan_inf_filter" in explain(episode).advice


@pytest.mark.parametrize("values", [[0.0] * 300, [0.5 * 0.9**step for step in range(100)] + [0.0] * 100])
def test_a_loss_that_is_zero_by_nature_or_by_rounding_is_fine(values: list[float]) -> None:
    assert run(losses(values, **{"grad/norm": 0.3})) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_that_stays_at_chance_is_told_after_its_time(seed: int) -> None:
    random = np.random.default_rng(seed)
    stuck = math.log(1000) + 0.05 * random.standard_normal(600)
    (episode,) = run(losses(stuck)).values()
    assert (episode.first.rule, episode.first.step, episode.severity) == (
        "never_learned",
        500,
        Severity.WARNING,
    )
    assert episode.count > 3
    assert "classes" in explain(episode).explanation


@pytest.mark.parametrize("seed", SEEDS)
def test_what_may_be_flat_is_not_stuck(seed: int) -> None:
    random = np.random.default_rng(seed)
    noise = 0.05 * random.standard_normal(800)
    assert run(losses(2.0 + noise, first=100_000)) == {}  # Continued from elsewhere: it learned before.
    assert run(losses(0.1 * noise)) == {}  # A policy's loss.
    fast = 2.0 + 8.0 * np.exp(-np.arange(800) / 4)
    assert (
        run(losses(fast + noise, every=500)) == {}
    )  # A sparse log of a run that learned between its first rows.
    late = np.concatenate([np.full(400, 6.9), 6.9 - np.linspace(0, 3, 400)])
    assert run(losses(late + noise)[:450]) == {}  # An early plateau: still before its time.


# grad_explosion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "fires"), [(0.02, True), (0.002, False)])
def test_steady_growth_of_the_norm(rate: float, fires: bool) -> None:
    def change(index: int, values: dict[str, float]) -> None:
        values["grad/norm"] *= math.exp(rate * max(0, index - 300))

    found = of(run(curve(600, change=change)), "grad_explosion")
    assert bool(found) is fires
    assert all(400 < episode.first.step < 550 and episode.severity is Severity.WARNING for episode in found)


# scaler_skips -------------------------------------------------------------------------------------------------------


def test_a_saw_tooth_of_the_scale_is_healthy() -> None:
    """Scenario R12: the scale doubles each 100 steps, two steps overflow, it halves: for the whole run."""
    items = []
    scale = 32768.0
    for step in range(3000):
        tooth = step % 100
        skipped = tooth in (98, 99)
        scale = 65536.0 if tooth == 97 else (32768.0 if tooth == 99 else scale)
        items.append(scalars(step, {"scaler/scale": scale, "scaler/skipped": float(skipped)}))
    assert run(items) == {}
    assert run([scalars(item.step, {"scaler/scale": item.values["scaler/scale"]}) for item in items]) == {}


@pytest.mark.parametrize(("every", "severity"), [(40, Severity.WARNING), (5, Severity.ERROR)])
def test_skips_without_a_reason(every: int, severity: Severity) -> None:
    items = [
        scalars(step, {"scaler/scale": 1024.0, "scaler/skipped": float(step % every == 0 and step > 20)})
        for step in range(600)
    ]
    (episode,) = run(items).values()
    assert (episode.first.rule, episode.severity) == ("scaler_skips", severity)


def test_a_scale_without_bound() -> None:
    items = [
        scalars(step, {"scaler/scale": 2.0 ** min(step, 60), "scaler/skipped": 0.0}) for step in range(80)
    ]
    (episode,) = run(items).values()
    assert (episode.first.key, episode.first.step) == ("scale", 41)


# lr_anomaly, overfit ------------------------------------------------------------------------------------------------


def test_a_learning_rate_of_zero() -> None:
    """Scenario R69: 0 at the first step only is no alert; 0 for the last fifth of the run is one."""
    assert run([scalars(step, {"train/lr": 1e-4 * min(step, 10)}) for step in range(100)]) == {}
    late = [scalars(step, {"train/lr": 1e-4 * (step < 80), "train/loss": 2.0}) for step in range(100)]
    (episode,) = run(late).values()
    assert (episode.first.rule, episode.first.key, episode.severity) == ("lr_anomaly", "zero", Severity.INFO)
    assert "is 0 while training goes on" in explain(episode).title
    assert run([scalars(step, {"train/lr": 0.0}) for step in range(200)]) == {}  # Somebody measures.


@pytest.mark.parametrize(("value", "key"), [(math.nan, "value"), (-1e-5, "value"), (1e-2, "jump")])
def test_a_learning_rate_that_cannot_be_right(value: float, key: str) -> None:
    items = [scalars(step, {"train/lr": value if step == 60 else 1e-4}) for step in range(100)]
    (episode,) = run(items).values()
    assert (episode.first.step, episode.first.key) == (60, key)


def test_schedules_that_are_right() -> None:
    warm = [1e-7, 1e-5, 1e-4, *[3e-4 * (1 - step / 200) for step in range(200)], 0.0]
    cycles = [1e-3 * 0.5 ** (step % 20) for step in range(200)]
    for rates in (warm, cycles):
        assert run([scalars(step, {"train/lr": rate}) for step, rate in enumerate(rates)]) == {}


def test_overfitting_is_an_info() -> None:
    items: list[Folded] = []
    for step in range(1000):
        items.append(scalars(step, {"train/loss": 2.0 - 0.0015 * step}))
        if step % 100 == 99:
            items.append(scalars(step, {"eval/loss": 2.0 + 0.03 * abs(step - 399) / 100}))
    (episode,) = run(items).values()
    assert (episode.first.rule, episode.first.step, episode.severity) == ("overfit", 699, Severity.INFO)
    assert "at step 399" in explain(episode).explanation


# All of them --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_logs_a_loss_only_is_judged_by_it(seed: int) -> None:
    """Scenario R21: no norm at all. What is missing is no zero, and raises nothing."""
    random = np.random.default_rng(seed)
    values = 2.5 + 4.0 * np.exp(-np.arange(500) / 100) + 0.05 * random.standard_normal(500)
    assert run(losses(values)) == {}
    values[400] = math.nan
    assert [episode.first.rule for episode in run(losses(values)).values()] == ["non_finite"]
