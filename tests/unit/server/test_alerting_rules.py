"""Rules scaler_collapse, grad_norm_spike, dead_layer and user, as timelines."""

from __future__ import annotations

import math

import pytest

from gradiometer_server.alerting.explain import explain
from gradiometer_server.domain.alerts import EpisodeState, Severity
from gradiometer_server.domain.folded import Folded, Layout
from tests.unit.server.alerting_timeline import (
    LAYERS,
    event,
    healthy,
    healthy_step,
    layers,
    only,
    run,
    scalars,
)


def overflow(step: int, scale: float, **values: float) -> list[Folded]:
    return [
        layers(step, nonfinite={"blocks.0.mlp.weight": 2, "embed.weight": 9}),
        scalars(step, {"grad/norm": math.inf}),
        scalars(step, {"train/loss": 2.0, "scaler/skipped": 1.0, "scaler/scale": scale, **values}),
    ]


# scaler_collapse ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skips", "severity"),
    [(3, None), (4, Severity.WARNING), (9, Severity.WARNING), (10, Severity.CRITICAL)],
)
def test_a_row_of_skips_after_a_success(skips: int, severity: Severity | None) -> None:
    items = healthy(1, 40, skipped=0.0)
    for count in range(1, skips + 1):
        items += overflow(40 + count, 65536.0 / 2**count)
    found = list(run(items).values())
    assert [episode.severity for episode in found] == ([] if severity is None else [severity])


def test_the_layer_that_overflows_is_named() -> None:
    items = healthy(1, 40, skipped=0.0)
    for count in range(1, 15):
        items += overflow(40 + count, 65536.0 / 2**count)
    episode = only(items)
    assert (episode.first.rule, episode.first.origin) == ("scaler_collapse", "backward")
    assert episode.layers == ("blocks.0.mlp.weight", "embed.weight")
    assert (episode.first.step, episode.first.baseline, episode.worst.value) == (44, 65536.0, 4.0)
    text = explain(episode)
    assert "blocks.0.mlp.weight" in text.title
    assert "65,536" in text.explanation


def test_the_forward_module_is_named_if_it_is_known() -> None:
    items = healthy(1, 40, skipped=0.0)
    for count in range(1, 6):
        items += [
            event(40 + count, "nonfinite_activation", modules=["blocks.0.mlp"]),
            *overflow(40 + count, 16.0),
        ]
    assert (only(items).first.origin, only(items).layers[0]) == ("forward", "blocks.0.mlp")


def test_halving_from_the_start_warns_well_before_one_and_is_critical_below() -> None:
    """Scenario R09: 65,536, 32,768, ... 0.25, one halving per step, no success ever."""
    scales = [65536.0 / 2**n for n in range(19)]
    steps = [scalars(n, {"scaler/scale": scale}) for n, scale in enumerate(scales)]
    first = list(run(steps[:14]).values())
    assert [episode.severity for episode in first] == [Severity.INFO]
    assert first[0].first.value is not None
    assert first[0].first.value >= 16
    assert only(steps).severity is Severity.CRITICAL


def test_twelve_overflows_below_one_are_one_alert() -> None:
    """Scenario R11: the scale is 0.5 and halves twelve times in a row."""
    steps = [scalars(10198 + n, {"scaler/scale": 0.5 / 2**n}) for n in range(13)]
    episode = only(steps)
    assert episode.first.step - 10198 <= 4
    assert episode.severity is Severity.CRITICAL


def test_an_ordinary_saw_tooth_is_silent() -> None:
    """Scenario R12: six halvings at the start, then one skip about every 53 steps for 7,360 steps."""
    items: list[Folded] = [
        scalars(step, {"scaler/scale": 65536.0 / 2**step, "scaler/skipped": 1.0}) for step in range(1, 7)
    ]
    scale = 1024.0
    for step in range(7, 7361):
        skipped = step % 53 == 0
        scale = scale / 2 if skipped else (scale * 2 if step % 53 == 20 else scale)
        items.append(scalars(step, {"scaler/scale": scale, "scaler/skipped": float(skipped)}))
    assert run(items) == {}


def test_a_fall_by_a_thousand_within_a_hundred_steps_is_an_error() -> None:
    items: list[Folded] = [scalars(1, {"scaler/scale": 65536.0, "scaler/skipped": 0.0})]
    scale, step = 65536.0, 1
    while scale > 16:
        for skipped in (1.0, 1.0, 0.0):
            step += 1
            scale = scale / 2 if skipped else scale
            items.append(scalars(step, {"scaler/scale": scale, "scaler/skipped": skipped}))
    assert only(items).severity is Severity.ERROR


# grad_norm_spike ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "severity"),
    [
        (2.5, None),
        (4.0, Severity.INFO),
        (7.0, Severity.INFO),
        (9.0, Severity.WARNING),
        (12.0, Severity.ERROR),
        (150.0, Severity.CRITICAL),
    ],
)
def test_tiers_of_a_spike(norm: float, severity: Severity | None) -> None:
    found = list(run([*healthy(1, 100), *healthy_step(101, norm=norm), *healthy(102, 110)]).values())
    assert [(episode.first.step, episode.severity) for episode in found] == (
        [(101, severity)] if severity else []
    )


@pytest.mark.parametrize(
    ("history", "norm", "fires"), [(40, 50.0, False), (40, 150.0, True), (20, 1e9, False)]
)
def test_cold_start(history: int, norm: float, fires: bool) -> None:
    assert bool(run([*healthy(1, history), *healthy_step(history + 1, norm=norm)])) is fires


def test_noise_raises_the_bar() -> None:
    noisy: list[Folded] = []
    for step in range(1, 129):
        noisy.append(scalars(step, {"grad/norm": math.exp(((step * 37) % 21 - 10) / 10)}))
    assert run([*noisy, scalars(129, {"grad/norm": 5.0})]) == {}


def test_the_value_itself_and_nonfinite_values_stay_out_of_the_baseline() -> None:
    items = healthy(1, 100)
    items += [
        scalars(step, {"grad/norm": value}) for step, value in [(101, math.nan), (102, math.inf), (103, 0.0)]
    ]
    found = run([*items, *healthy_step(104, norm=20.0)])
    spike = next(episode for episode in found.values() if episode.first.rule == "grad_norm_spike")
    assert spike.first.baseline == pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize("order", ["layers first", "norm first"])
def test_the_layer_behind_a_spike_is_named_first(order: str) -> None:
    norm = scalars(101, {"grad/norm": 20.05})
    spike = layers(101, [0.45, 0.45, 3.0, 19.8, 0.45])
    items = [spike, norm] if order == "layers first" else [norm, spike]
    episode = only([*healthy(1, 100), *items])
    assert (episode.layers, episode.count) == (("blocks.1.attn.weight", "blocks.0.mlp.weight"), 1)
    assert "blocks.1.attn.weight" in explain(episode).title


def test_a_warning_is_held_back_during_learning_rate_warm_up() -> None:
    def timeline(lr_at: float) -> list[Folded]:
        items = healthy(1, 100)
        items += [scalars(step, {"train/lr": 1e-5 * step * lr_at + 1e-4}) for step in (99, 100)]
        return items

    assert run([*timeline(1.0), *healthy_step(101, norm=9.0)]) == {}
    assert only([*timeline(0.0), *healthy_step(101, norm=9.0)]).severity is Severity.WARNING
    assert only([*timeline(1.0), *healthy_step(101, norm=15.0)]).severity is Severity.ERROR


def test_a_second_spike_soon_after_extends_the_episode() -> None:
    items = [
        *healthy(1, 100),
        *healthy_step(101, norm=5.0),
        *healthy(102, 110),
        *healthy_step(111, norm=30.0),
    ]
    episode = only([*items, *healthy(112, 160)])
    assert (episode.count, episode.severity, episode.worst.step) == (2, Severity.ERROR, 111)
    assert (episode.state, episode.first.step, episode.last_step) == (EpisodeState.RESOLVED, 101, 111)


# dead_layer ---------------------------------------------------------------------------------------------------------


def test_a_layer_that_never_learns_is_found_after_twenty_steps() -> None:
    items = [layers(step, zero=["blocks.0.mlp.weight"]) for step in range(1, 21)]
    assert run(items[:19]) == {}
    episode = only(items)
    assert (episode.severity, episode.layers, episode.num_layers) == (
        Severity.WARNING,
        ("blocks.0.mlp.weight",),
        1,
    )


def test_a_layer_that_dies_later_is_found_after_fifty_steps() -> None:
    items: list[Folded] = [layers(step) for step in range(1, 31)]
    items += [layers(step, zero=["blocks.0.mlp.weight", "embed.weight"]) for step in range(31, 81)]
    assert run(items[:-1]) == {}
    episode = only(items)
    assert episode.layers == ("blocks.0.mlp.weight", "embed.weight")
    assert "since step 31" in explain(episode).explanation


def test_the_module_that_is_dead_as_a_whole_is_named_before_its_reader() -> None:
    """A shut ReLU behind `up`: `down` still has a bias that learns, so the gradient stopped at `up`."""
    names = ("norm.weight", "up.weight", "up.bias", "down.weight", "down.bias")
    layout = Layout(layout_id=3, names=names, numels=(1,) * 5)
    items = [layers(step, zero=names[:4], layout=layout) for step in range(1, 30)]
    assert only(items).layers == ("up.bias", "up.weight", "norm.weight", "down.weight")


def test_a_parameter_that_is_never_reached_is_found() -> None:
    episode = only([layers(step, [1.0, None, 1.0, 1.0, 1.0]) for step in range(1, 25)])
    assert episode.layers == ("blocks.0.attn.weight",)


def test_a_layer_frozen_later_on_purpose_is_not_dead() -> None:
    items: list[Folded] = [layers(step) for step in range(1, 31)]
    items += [layers(step, [None, 1.0, 1.0, 1.0, 1.0]) for step in range(31, 200)]
    assert run(items) == {}


def test_a_layer_that_wakes_up_now_and_then_is_not_dead() -> None:
    items = [layers(step, zero=[] if step % 40 == 0 else ["head.weight"]) for step in range(0, 400)]
    assert run(items) == {}


def test_it_resolves_when_the_layer_learns_again() -> None:
    items: list[Folded] = [layers(step, zero=["head.weight"]) for step in range(1, 41)]
    episode = only([*items, *[layers(step) for step in range(41, 100)]])
    assert episode.state is EpisodeState.RESOLVED


def test_gradients_that_are_all_zero_are_an_error() -> None:
    """Scenario R22: loss ln(vocabulary) and norm exactly 0 in every step."""
    items = [scalars(step, {"train/loss": 11.93, "grad/norm": 0.0}) for step in range(1, 201)]
    assert run(items[:7]) == {}
    found = run(
        [*items, *[scalars(step, {"train/loss": 11.93, "grad/norm": 0.0}) for step in range(201, 700)]]
    )
    assert list(found) == ["1-grad_zero-8", "1-never_learned-500"]
    episode, stuck = found.values()
    assert (episode.severity, episode.state) == (Severity.ERROR, EpisodeState.FIRING)
    assert "step 1" in explain(episode).title
    assert "classes" in explain(stuck).explanation


def test_all_layers_zero_is_one_alert_not_two() -> None:
    items: list[Folded] = []
    for step in range(1, 60):
        items += [layers(step, zero=LAYERS), scalars(step, {"grad/norm": 0.0})]
    assert only(items).first.rule == "grad_zero"


def test_single_steps_without_gradient_are_legitimate() -> None:
    """In reinforcement learning a batch of equal rewards has none."""
    norms = [0.0 if step % 9 < 5 else 1.0 for step in range(100)]
    assert run([scalars(step, {"grad/norm": norm}) for step, norm in enumerate(norms)]) == {}


# user ---------------------------------------------------------------------------------------------------------------


def test_a_user_alert_is_passed_on_as_given() -> None:
    episode = only(
        [*healthy(1, 5), event(5, "alert", title="BLEU fell", text="from 30 to 3", severity="error")]
    )
    text = explain(episode)
    assert (episode.first.rule, episode.severity, episode.first.step) == ("user", Severity.ERROR, 5)
    assert text.title == "BLEU fell"
    assert "from 30 to 3" in text.explanation


def test_titles_separate_user_alerts_and_repeats_extend_them() -> None:
    items = [
        *healthy(1, 5),
        *[event(step, "alert", title=title) for step, title in [(5, "a"), (5, "b"), (6, "a")]],
    ]
    found = run(items)
    assert sorted((episode.first.key, episode.count) for episode in found.values()) == [("a", 2), ("b", 1)]


def test_a_user_alert_with_odd_attributes_still_arrives() -> None:
    episode = only([event(None, "alert", title="", severity="catastrophic", text=None)])
    assert (episode.severity, explain(episode).title) == (Severity.WARNING, "Alert from the training code")
