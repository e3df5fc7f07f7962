"""Rule non_finite: one episode for one incident, with the first layer, the first rank and the scaler's excuse."""

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

NAN, INF = math.nan, math.inf
BAD = dict.fromkeys(LAYERS, 3)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_nonfinite_loss_is_critical_at_once(value: float) -> None:
    episode = only([*healthy(1, 30), scalars(31, {"train/loss": value})])
    assert (episode.severity, episode.first.step, episode.first.metric) == (
        Severity.CRITICAL,
        31,
        "train/loss",
    )
    assert episode.alert_id == "1-non_finite-31"


@pytest.mark.parametrize("metric", ["train/loss", "train/lm_loss", "loss", "train/Loss_total"])
def test_every_training_loss_counts(metric: str) -> None:
    assert only([*healthy(1, 5), scalars(6, {metric: NAN})]).first.metric == metric


def test_squares_beyond_float64_are_not_nonfinite_gradients() -> None:
    """Float64 gradients of 1e200: no element is NaN or infinite, only the norm is."""
    overflowed = layers(31, [1.0, math.inf, 1.0, 1.0, 1.0])
    totals = {"grad/norm": INF, "grad/num_nonfinite": 0.0}
    assert run([*healthy(1, 30), overflowed, scalars(31, totals), *healthy(32, 60)]) == {}
    # An agent that says nothing of elements is believed.
    assert only([*healthy(1, 30), scalars(31, {"grad/norm": INF}), *healthy(32, 60)]).first.step == 31
    totals["grad/num_nonfinite"] = 1.0
    bad = layers(31, nonfinite={LAYERS[1]: 1})
    assert only([*healthy(1, 30), bad, scalars(31, totals), *healthy(32, 60)]).layers == (LAYERS[1],)


@pytest.mark.parametrize(
    "metric", ["val/loss", "train/accuracy", "memory/allocated_bytes", "debug/loss_ratio"]
)
def test_other_scalars_may_be_nan(metric: str) -> None:
    assert run([*healthy(1, 5), scalars(6, {metric: NAN})]) == {}


def test_the_rank_whose_loss_is_nan_is_named() -> None:
    """Scenario R27: the NaN is on rank 1 only."""
    by_rank = {"train/loss": {0: 2.0, 1: NAN}}
    episode = only([*healthy(1, 29), scalars(30, {"train/loss": NAN}, by_rank=by_rank)])
    assert (episode.first.step, episode.ranks) == (30, (1,))
    assert "rank 1" in explain(episode).title


def test_a_rank_is_seen_although_the_merged_loss_is_finite() -> None:
    by_rank = {"train/loss_max": {0: 2.0, 1: INF}}
    episode = only([*healthy(1, 29), scalars(30, {"train/loss_max": 2.0}, by_rank=by_rank)])
    assert episode.ranks == (1,)
    assert episode.first.value == INF


def test_the_first_module_of_the_forward_pass_is_named_first() -> None:
    episode = only(
        [
            *healthy(1, 30),
            event(31, "nonfinite_activation", rank=2, modules=["blocks.0.attn", "blocks.0", "head"]),
            layers(31, nonfinite=BAD, ranks={0: LAYERS, 2: LAYERS}),
            scalars(31, {"grad/norm": NAN}),
            scalars(31, {"train/loss": NAN, "time/step_s": 0.1}),
        ]
    )
    assert (episode.first.origin, episode.layers[0]) == ("forward", "blocks.0.attn")
    assert episode.ranks[0] == 2
    assert episode.num_layers == len(LAYERS)
    assert "forward" in explain(episode).explanation
    assert "blocks.0.attn" in explain(episode).title


def test_without_a_forward_event_the_first_layer_in_backward_order_is_named() -> None:
    bad = {"embed.weight": 1, "blocks.0.attn.weight": 5}
    episode = only([*healthy(1, 30), layers(31, nonfinite=bad, ranks={1: bad}), *healthy_step(31)[1:]])
    assert (episode.first.origin, episode.layers) == ("backward", ("blocks.0.attn.weight", "embed.weight"))
    assert episode.ranks == (1,)


def test_all_layers_at_once_names_the_one_that_had_been_growing() -> None:
    growing: list[Folded] = []
    for step in range(1, 41):
        growing += [layers(step, [1.0, 1.0, 1.0 * 1.1**step, 1.0, 1.0]), scalars(step, {"time/step_s": 0.1})]
    episode = only([*growing, layers(41, nonfinite=BAD), scalars(41, {"train/loss": NAN})])
    assert (episode.first.origin, episode.layers[0]) == ("growth", "blocks.0.mlp.weight")
    assert "suspect" in explain(episode).title


def test_all_layers_at_once_without_growth_blames_nobody() -> None:
    episode = only([*healthy(1, 40), scalars(41, {"train/loss": NAN}), layers(41, nonfinite=BAD)])
    assert episode.first.origin == ""
    assert "nothing before it points at a layer" in explain(episode).explanation
    assert LAYERS[0] not in explain(episode).title


@pytest.mark.parametrize("order", ["loss first", "layers first"])
def test_loss_and_gradients_are_one_episode_in_either_order(order: str) -> None:
    loss, gradients = scalars(31, {"train/loss": NAN}), layers(31, nonfinite={"head.weight": 1})
    items = [loss, gradients] if order == "loss first" else [gradients, loss]
    episode = only([*healthy(1, 30), *items])
    assert (episode.count, episode.first.step, episode.layers) == (1, 31, ("head.weight",))
    assert any("train/loss is NaN" in fact for fact in episode.facts)


def test_a_lasting_nan_is_one_episode_with_a_count() -> None:
    """Scenario R73: NaN from step 100 to step 1,000."""
    items = healthy(1, 99)
    for step in range(100, 1001):
        items += [layers(step, nonfinite=BAD), scalars(step, {"train/loss": NAN})]
    episode = only(items)
    assert (episode.count, episode.first.step, episode.last_step) == (901, 100, 1000)
    assert episode.state is EpisodeState.FIRING


def test_it_resolves_after_twenty_quiet_steps() -> None:
    items = [*healthy(1, 30), scalars(31, {"train/loss": NAN})]
    assert only([*items, *healthy(32, 51)]).state is EpisodeState.FIRING
    episode = only([*items, *healthy(32, 60)])
    assert (episode.state, episode.resolved_step) == (EpisodeState.RESOLVED, 52)


def test_quiet_steps_count_reports_and_not_step_numbers() -> None:
    items = [scalars(100 * n, {"train/loss": NAN if n in (30, 40) else 2.0}) for n in range(1, 50)]
    assert only(items).count == 2


# With a GradScaler ---------------------------------------------------------------------------------------------------


def overflow(step: int, *, skipped: float = 1.0, loss: float = 2.0, scale: float = 32768.0) -> list[Folded]:
    """A step whose gradients overflowed; layers first, the scaler's word after them."""
    return [
        layers(step, nonfinite={"head.weight": 4}),
        scalars(step, {"grad/norm": INF}),
        scalars(
            step, {"time/step_s": 0.1, "scaler/skipped": skipped, "scaler/scale": scale, "train/loss": loss}
        ),
    ]


def test_an_isolated_skip_is_the_scalers_business() -> None:
    assert run([*healthy(1, 40, skipped=0.0), *overflow(41), *healthy(42, 80, skipped=0.0)]) == {}


def test_the_search_for_the_first_scale_is_no_alert() -> None:
    """Scenario R26: the first norms are NaN while the scale falls; afterwards a NaN is critical."""
    start = [item for step in (0, 1, 2) for item in overflow(step, scale=65536.0 / 2 ** (step + 1))]
    assert run([*start, *healthy(3, 60, skipped=0.0)]) == {}
    later = [layers(61, nonfinite=BAD), scalars(61, {"train/loss": NAN, "scaler/skipped": 0.0})]
    assert only([*start, *healthy(3, 60, skipped=0.0), *later]).severity is Severity.CRITICAL


def test_gradients_wait_for_the_scalers_word_and_no_longer() -> None:
    items = healthy(1, 40, skipped=0.0)
    waiting = [layers(41, nonfinite={"head.weight": 1}), scalars(41, {"grad/norm": NAN})]
    assert run([*items, *waiting]) == {}
    assert only([*items, *waiting, scalars(41, {"scaler/skipped": 0.0})]).severity is Severity.CRITICAL
    assert run([*items, *waiting, scalars(41, {"scaler/skipped": 1.0}), *healthy(42, 50, skipped=0.0)]) == {}
    # The word never came, but that of many later steps did.
    assert run([*items, *waiting, *healthy(42, 57, skipped=0.0)]) == {}
    assert only([*items, *waiting, *healthy(42, 58, skipped=0.0)]).first.step == 41


@pytest.mark.parametrize("first", [1, 41], ids=["from the start", "later"])
def test_a_loss_that_travels_ahead_of_the_scalers_word_does_not_end_the_waiting(first: int) -> None:
    steps = range(first, first + 8)
    skipped = {first, first + 2}
    frames = [
        [layers(step, nonfinite={"head.weight": 4} if step in skipped else {}) for step in steps],
        [scalars(step, {"train/loss": 2.6}) for step in steps],
        [
            scalars(step, {"time/step_s": 0.1, "scaler/scale": 65536.0, "scaler/skipped": 0.0})
            for step in steps
            if step not in skipped
        ],
        [scalars(step, {"scaler/scale": 65536.0, "scaler/skipped": 1.0}) for step in sorted(skipped)],
    ]
    batch = [item for frame in frames for item in frame]
    assert run([*healthy(1, first - 1, skipped=0.0), *batch, *healthy(first + 8, 80, skipped=0.0)]) == {}


def test_the_end_of_the_process_ends_the_waiting() -> None:
    items = [*healthy(1, 40, skipped=0.0), layers(41, nonfinite={"head.weight": 1})]
    assert run(items) == {}
    assert only([*items, event(41, "exit", code=1, signal=None)]).first.step == 41


def test_frames_of_several_steps_may_bring_the_layers_before_all_scalars() -> None:
    steps = [overflow(step) if step == 42 else healthy_step(step, skipped=0.0) for step in range(41, 46)]
    batched = [step[0] for step in steps] + [step[1] for step in steps] + [step[2] for step in steps]
    assert run([*healthy(1, 40, skipped=0.0), *batched, *healthy(46, 60, skipped=0.0)]) == {}


def test_nonfinite_gradients_that_were_not_skipped_are_critical() -> None:
    episode = only([*healthy(1, 40, skipped=0.0), *overflow(41, skipped=0.0)])
    assert episode.severity is Severity.CRITICAL
    assert any("not skipped" in fact for fact in episode.facts)


def test_one_bad_loss_with_a_skip_is_a_warning_and_a_second_is_critical() -> None:
    items = [*healthy(1, 40, skipped=0.0), *overflow(41, loss=NAN), *healthy(42, 45, skipped=0.0)]
    assert only(items).severity is Severity.WARNING
    assert only([*items, *overflow(46, loss=NAN)]).severity is Severity.CRITICAL


def test_a_lasting_nan_loss_under_the_scaler_is_one_episode_and_no_scaler_alert() -> None:
    bad = [
        item for step in range(41, 70) for item in overflow(step, loss=NAN, scale=65536 / 2.0 ** (step - 40))
    ]
    episode = only([*healthy(1, 40, skipped=0.0), *bad])
    assert (episode.first.rule, episode.severity, episode.count) == ("non_finite", Severity.CRITICAL, 29)


def test_absent_gradients_are_not_nonfinite() -> None:
    assert run([layers(step, [None, 1.0, None, 1.0, 1.0]) for step in range(1, 10)]) == {}


def test_two_hundred_bad_layers_are_counted_and_twenty_named() -> None:
    names = tuple(f"layer.{index}" for index in range(200))
    layout = Layout(layout_id=2, names=names, numels=(1,) * 200)
    bad = dict.fromkeys(names[:150], 1)
    episode = only(
        [*healthy(1, 20), layers(21, [1.0] * 200, nonfinite=bad, layout=layout), scalars(22, {"a": 1.0})]
    )
    assert (episode.num_layers, len(episode.layers), episode.layers[0]) == (150, 20, "layer.149")
