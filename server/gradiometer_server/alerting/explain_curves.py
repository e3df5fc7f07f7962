"""Texts of the alerts that are read off curves: losses, gradient norms, loss scale and learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.words import Explanation, facts, sentences, since
from gradiometer_server.domain.alerts import Episode, Severity


def _loss_spike(episode: Episode) -> Explanation:
    first, worst = episode.first, episode.worst
    peak = ""
    if worst.step != first.step:
        peak = f"The highest so far is {number_text(worst.value)} at step {worst.step}."
    alone = episode.severity is Severity.INFO
    return Explanation(
        title=f"{first.metric} jumped to {number_text(first.value)} at step {first.step}",
        explanation=sentences(
            facts(first),
            peak,
            "One step alone is most often a hard batch." if alone else "",
            ""
            if alone
            else "Batches that do not fit, a learning rate that is too high for where the model is, and a "
            "second-moment estimate of Adam that lags behind do this.",
            since(episode),
        ),
        advice="Look at the batch of that step if it happens again."
        if alone
        else "Wait 20 steps. If the loss is not back, restart about 100 steps earlier and skip the batches around that "
        "step; lower the learning rate or Adam's beta2. The gradient norm of the steps just before tells whether the "
        "gradient went first.",
    )


def _loss_divergence(episode: Episode) -> Explanation:
    first, worst = episode.first, episode.worst
    return Explanation(
        title=f"{first.metric} is rising: {_percent(worst.value, worst.baseline)} above its best at step {worst.step}",
        explanation=sentences(
            facts(first),
            "A learning rate that is too high, a warm-up that is too short, and data that came in with a resume do this.",
            since(episode),
        ),
        advice="Go back to the checkpoint nearest to the best loss and go on with a lower learning rate or a longer "
        "warm-up. If the data was changed on purpose, compare the loss on held-out data instead.",
    )


def _loss_rise(episode: Episode) -> Explanation:
    first = episode.first
    return Explanation(
        title=f"{first.metric} went up by {_percent(first.value, first.baseline)} before step {first.step}",
        explanation=sentences(
            facts(first),
            "It stays there, which noise does not do. Another mixture of data, a longer sequence or a resume that reads "
            "other data than before do this.",
            since(episode),
        ),
        advice="Compare with what was changed at that time: data, order of the data, batch size, a resume. If nothing "
        "was, look at the learning rate and at the gradient norm.",
    )


def _loss_zero(episode: Episode) -> Explanation:
    first = episode.first
    masked = any("not finite" in fact for fact in first.facts)
    return Explanation(
        title=f"{first.metric} is exactly 0 up to step {episode.last_step}: that is no success",
        explanation=sentences(
            facts(first),
            "The logger writes 0, or a mean, where the loss was NaN."
            if masked
            else "A real loss does not reach 0 from there. All labels masked, an empty batch, or a NaN that the logger "
            "hides do this.",
            since(episode),
        ),
        advice="Treat the run as dead since the first such step, and go back to a checkpoint before it. With Hugging "
        "Face's Trainer set logging_nan_inf_filter=False, so that it shows what the loss really was."
        if masked
        else "Print one batch: how many labels are not masked, and what the loss is before any logger sees it. With "
        "Hugging Face's Trainer set logging_nan_inf_filter=False.",
    )


def _never_learned(episode: Episode) -> Explanation:
    first = episode.first
    return Explanation(
        title=f"{first.metric} has not fallen since the start: {number_text(first.value)} at step {first.step}",
        explanation=sentences(
            facts(first),
            "Weights that were not loaded, labels that do not belong to their inputs, parameters that are in no "
            "optimizer, and a learning rate of 0 or far too high do this.",
            since(episode),
        ),
        advice="Check that the model learns one single batch by heart: if not, the loop is wrong (parameters in the "
        "optimizer, zero_grad, detach); if it does, look at the labels and at the learning rate.",
    )


def _overfit(episode: Episode) -> Explanation:
    first = episode.first
    return Explanation(
        title=f"{first.metric} rises while the training loss falls, up to step {episode.last_step}",
        explanation=sentences(
            facts(first), "From its best step on, the model learns what does not carry over.", since(episode)
        ),
        advice="Keep the checkpoint of the best evaluation. More data, more regularisation or fewer epochs move it on.",
    )


def _grad_explosion(episode: Episode) -> Explanation:
    first, worst = episode.first, episode.worst
    return Explanation(
        title=f"Gradient norm grows steadily: {number_text(worst.value)} at step {worst.step}",
        explanation=sentences(
            facts(first),
            "Growth by a steady factor ends in an explosion. A learning rate that is too high does this, and so do "
            "values that grow inside the model, such as attention logits.",
            since(episode),
        ),
        advice="Look at which layers grow. Check that clipping is on, lower the peak learning rate, or bound the "
        "logits (QK-norm, z-loss). There is no need to stop yet.",
    )


def _grad_zero(episode: Episode) -> Explanation:
    first = episode.first
    start = first.facts[0].rpartition("since ")[2] if first.facts else f"step {first.step}"
    return Explanation(
        title=f"All gradients are exactly zero since {start}",
        explanation=sentences(facts(first), since(episode)),
        advice="Check that the loss depends on the model's parameters, that nothing detaches it, that the weights "
        "were really loaded, and that gradients are not cleared between backward() and step().",
    )


def _scaler_skips(episode: Episode) -> Explanation:
    first = episode.first
    if first.key == "scale":
        return Explanation(
            title=f"The loss scale grows without bound: {number_text(episode.worst.value)} at step {first.step}",
            explanation=sentences(
                facts(first),
                "It grows for as long as nothing overflows, so the gradients are tiny.",
                since(episode),
            ),
            advice="Check that the loss is not 0 and that gradients flow. If the gradients are bfloat16 or float32, "
            "the gradient scaler is of no use: leave it out.",
        )
    share = "" if first.value is None else f": {number_text(100 * first.value)} %"
    return Explanation(
        title=f"The gradient scaler skips too many steps, at step {first.step}{share}",
        explanation=sentences(
            facts(first),
            "A healthy scaler skips a step only after it has tried a higher scale. These steps were lost.",
            since(episode),
        ),
        advice="Look at which layers overflow in the skipped steps. Switch to bfloat16, or run those layers in float32.",
    )


def _lr_anomaly(episode: Episode) -> Explanation:
    first = episode.first
    titles = {
        "zero": f"The learning rate is 0 while training goes on, at step {first.step}",
        "jump": f"The learning rate jumped at step {first.step}",
    }
    causes = {
        "zero": "Nothing is learned any more. A schedule that was told too few steps, or that is stepped once per "
        "process, ends early.",
        "jump": "It is higher than it ever was. A resume without the state of the schedule does this.",
    }
    return Explanation(
        title=titles.get(first.key, f"The learning rate is {number_text(first.value)} at step {first.step}"),
        explanation=sentences(
            facts(first), causes.get(first.key, "No optimizer can use that."), since(episode)
        ),
        advice="Check the number of steps that the schedule was given, how often scheduler.step() is called, and that "
        "its state is restored on a resume.",
    )


def _percent(value: float | None, baseline: float | None) -> str:
    if value is None or not baseline:
        return "well"
    return f"{number_text(100 * (value - baseline) / abs(baseline))} %"


CURVE_TEXTS: Final[dict[str, Callable[[Episode], Explanation]]] = {
    "loss_spike": _loss_spike,
    "loss_divergence": _loss_divergence,
    "loss_rise": _loss_rise,
    "loss_zero": _loss_zero,
    "never_learned": _never_learned,
    "overfit": _overfit,
    "grad_explosion": _grad_explosion,
    "grad_zero": _grad_zero,
    "scaler_skips": _scaler_skips,
    "lr_anomaly": _lr_anomaly,
}
