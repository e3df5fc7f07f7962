"""An episode in an engineer's words: what happened, since when, which layer and rank first, and what to do."""

from __future__ import annotations

from collections.abc import Callable

from gradiometer_server.alerting.explain_curves import CURVE_TEXTS
from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.words import (
    Explanation,
    capital,
    facts,
    first_layer,
    in_layer,
    on_rank,
    sentences,
    since,
    times,
)
from gradiometer_server.domain.alerts import Breach, Episode


def explain(episode: Episode) -> Explanation:
    """The text for one episode. It speaks of the first breach, because later ones are its aftermath."""
    return _TEXTS.get(episode.first.rule, _unknown)(episode)


def _non_finite(episode: Episode) -> Explanation:
    first = episode.first
    what = "Gradients" if first.metric.startswith("grad/") else first.metric
    verb = "became non-finite" if what == "Gradients" else f"became {number_text(first.value)}"
    lead = {
        "forward": "It started in the forward pass.",
        "backward": "It started in the backward pass: going backward from the loss, {layer} is the first layer "
        "whose gradient is not finite.",
        "growth": "The loss itself was not finite, and so every gradient is; their order tells nothing. The gradient "
        "of {layer} had grown most over the last 20 steps before, which makes it the first suspect.",
    }.get(
        first.origin,
        "The loss itself was not finite, and so every gradient is; nothing before it points at a layer."
        if first.num_layers
        else "No report of the layers tells where it began.",
    )
    ruined = "Stop or pause the run: what it writes from here on may be ruined."
    if any("skipped the step" in fact for fact in first.facts):
        ruined = (
            "Stop or pause the run: the skipped steps left the weights as they were, but nothing is learned."
        )
    advice = (
        f"{ruined} Go back to the last checkpoint before step {first.step} and run that batch again with "
        f"torch.autograd.set_detect_anomaly(True). {_look_at(first)}"
    )
    if episode.severity.value == "warning":
        advice = (
            "One batch with a non-finite loss whose step was skipped does no damage: the weights did not change. Look "
            "at that batch; if it happens again this alert becomes critical."
        )
    return Explanation(
        title=f"{what} {verb} at step {first.step}{in_layer(first)}{on_rank(first)}",
        explanation=sentences(lead.format(layer=first_layer(first)), facts(first), since(episode)),
        advice=advice,
    )


def _look_at(first: Breach) -> str:
    if first.origin == "forward":
        return (
            "Look there for values beyond the range of float16 (65,504), a softmax over a fully masked row, a division "
            "by zero, a logarithm or square root of a value that is not positive."
        )
    return "Check masks, divisions, logarithms and square roots, and the range of float16 (65,504)."


def _grad_norm_spike(episode: Episode) -> Explanation:
    first, worst = episode.first, episode.worst
    layers = ", ".join(first.layers[:3])
    source = f"Most of the increase over each layer's own median is in {layers}." if layers else ""
    peak = ""
    if worst.step != first.step:
        peak = f"The worst step so far is {worst.step}, with {number_text(worst.value)}."
    return Explanation(
        title=f"Gradient norm {times(first)} its median at step {first.step}{in_layer(first)}",
        explanation=sentences(
            f"The gradient norm before clipping was {number_text(first.value)} at step {first.step}; the median of up to "
            f"128 steps before is {number_text(first.baseline)}.",
            source,
            peak,
            "A single bad batch does this, and so does a learning rate that is too high.",
            since(episode),
        ),
        advice="Look at the batch of that step. Check that gradient clipping is on. If the loss is not back within 20 "
        "steps, restart about 100 steps earlier and skip those batches; if it comes again, lower the peak learning rate.",
    )


def _scaler_collapse(episode: Episode) -> Explanation:
    first, worst = episode.first, episode.worst
    lead = {
        "forward": "The overflow starts in the forward pass, in {layer}.",
        "backward": "Going backward from the loss, {layer} is the first layer whose gradient overflows.",
    }.get(first.origin, "No layer report tells which gradient overflows.")
    return Explanation(
        title=f"Loss scale is collapsing: {number_text(worst.value)} at step {worst.step}{in_layer(first)}",
        explanation=sentences(
            f"The gradient scaler skips step after step, so the model does not learn. {capital(worst.facts)}.",
            lead.format(layer=first_layer(first)),
            "Unlike an occasional skip, which is how the scaler finds its scale, a lower scale does not help here.",
            since(episode),
        ),
        advice="Switch to bfloat16, or run that layer in float32 (torch.autocast(enabled=False) around it). Look at its "
        "values: a float16 gradient must stay below 65,504 after scaling. If the weights came from a bfloat16 training, "
        "float16 cannot hold them.",
    )


def _dead_layer(episode: Episode) -> Explanation:
    first = episode.first
    count = episode.num_layers
    noun = "layer gets" if count == 1 else "layers get"
    return Explanation(
        title=f"{count} trainable {noun} no gradient: {first_layer(first)}{', ...' if count > 1 else ''}",
        explanation=sentences(
            facts(first),
            f"Noticed at step {first.step}. Such a layer does not learn. Typical causes: a ReLU whose inputs are all negative, a branch that is never "
            "taken, an output that is detached, adapters attached to the wrong modules.",
            since(episode),
        ),
        advice="Look at the activations in front of this layer. With activation checkpointing and frozen inputs use "
        "use_reentrant=False or enable_input_require_grads(). If the layer is meant to be frozen, set "
        "requires_grad=False and it is no longer reported.",
    )


def _user(episode: Episode) -> Explanation:
    title, text = (*episode.first.facts, "", "")[:2]
    return Explanation(
        title=title or "Alert from the training code",
        explanation=sentences(text, f"Sent by run.alert() at step {episode.first.step}.", since(episode)),
        advice="The training code raised this alert itself; see where it calls run.alert().",
    )


def _check(episode: Episode) -> Explanation:
    title, text, advice = (*episode.first.facts, "", "", "")[:3]
    return Explanation(
        title=title or "A mistake in the training loop",
        explanation=sentences(text, f"First seen at step {episode.first.step}.", _times_true(episode)),
        advice=advice or "Look at the training loop around optimizer.step().",
    )


def _times_true(episode: Episode) -> str:
    """How often a check was true: the agent tells it at 1, 10, 100, ... times."""
    count = episode.worst.value
    if count is None or count < 2:
        return ""
    return f"True at least {number_text(count)} times, up to step {episode.last_step}."


def _replica_mismatch(episode: Episode) -> Explanation:
    first = episode.first
    ranks = " and ".join(str(rank) for rank in first.ranks) or "unknown"
    return Explanation(
        title=f"Ranks {ranks} hold different gradients of {first_layer(first)} at step {first.step}",
        explanation=sentences(
            f"They say that they hold the same part of {first_layer(first)}, whose gradient must then be the same on both.",
            facts(first),
            "The lower rank's counts in the figures; other layers may differ too.",
            since(episode),
        ),
        advice="If these ranks are to hold copies (DDP, HSDP), they are training different models: check that everything "
        "that is trained is inside the wrapper, that gradients are reduced before the step, and that no rank changes "
        "them on its own. If the layer is meant to differ from rank to rank (experts, stages), say so: "
        'watch(..., sharded={"pattern of names": process_group}), or watch(..., name="stage1") on that rank.',
    )


def _incomplete_gradient(episode: Episode) -> Explanation:
    first = episode.first
    missing = f"Nothing of this step came from {_ranks(first.ranks)}." if first.ranks else ""
    return Explanation(
        title=f"Only {number_text(100 * (first.value or 0.0))} % of the gradient is reported since about step {first.step}",
        explanation=sentences(
            facts(first),
            missing,
            "The norm of the whole gradient and the figures of those layers are left out, because without the missing "
            "parts they would be wrong.",
            since(episode),
        ),
        advice="Check that gradiometer.init() and watch() run on every rank, and that the agents of the missing ranks "
        "reach the server. What they keep in their spool is sent later, but not merged into steps that were shown.",
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(str(rank) for rank in ranks)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _unknown(episode: Episode) -> Explanation:
    first = episode.first
    return Explanation(
        title=f"{first.rule} at step {first.step}{in_layer(first)}",
        explanation=sentences(facts(first), since(episode)),
        advice="This alert was raised by another version of the server; look at the chart at that step.",
    )


_TEXTS: dict[str, Callable[[Episode], Explanation]] = {
    "non_finite": _non_finite,
    "grad_norm_spike": _grad_norm_spike,
    "scaler_collapse": _scaler_collapse,
    "dead_layer": _dead_layer,
    "user": _user,
    "replica_mismatch": _replica_mismatch,
    "incomplete_gradient": _incomplete_gradient,
    "check": _check,
    **CURVE_TEXTS,
}
