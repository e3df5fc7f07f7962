"""Rule `non_finite`: a NaN or infinity in a loss or in the gradients, and where it came from first.

One episode covers one incident: loss, gradients and the steps that the GradScaler skipped because of it. Under a
GradScaler a non-finite gradient with a finite loss and a skipped step is the scaler's normal business and is left to
rule `scaler_collapse`; without a skip it goes into the weights and is critical at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.alerting.rules.base import (
    MAX_NAMED_LAYERS,
    has_nonfinite_loss,
    nonfinite_layers,
    nonfinite_losses,
    number_text,
)
from gradiometer_server.alerting.rules.scaler import SCALE, SKIPPED, skipped_step
from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedEvent, FoldedLayers, FoldedScalars, FoldedStep
from gradiometer_server.domain.names import GRAD_NORM, GRAD_NUM_NONFINITE

_VERSION = 1
_AGENT_GROUPS = ("time/", "memory/", "scaler/")


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteDefaults:
    """Defaults of the rule.

    Attributes:
        quiet_steps: steps without a non-finite value after which the episode resolves.
        isolation_steps: one bad loss in so many steps, whose step the scaler skipped, damaged nothing: a warning.
        hold_steps: how long gradients wait for the scaler's word if it never comes at all.
    """

    quiet_steps: int = 20
    isolation_steps: int = 100
    hold_steps: int = 16


class _Evidence(msgspec.Struct, kw_only=True):
    """Everything non-finite known of one step."""

    step: int
    time_s: float
    losses: dict[str, float] = {}
    loss_ranks: list[int] = []
    grad_norm: float | None = None
    layers: list[str] = []
    num_layers: int = 0
    all_layers: bool = False
    layer_ranks: list[int] = []
    suspect: tuple[str, float] | None = None
    modules: list[str] = []
    module_rank: int = 0
    skipped: bool | None = None
    """Whether the scaler skipped the step; None: not known, or there is no scaler."""
    final: bool = False
    """The step's scalars can no longer come."""
    emitted: list[str] = []
    """What the last breach of this step said, so that the same is not said twice."""


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    scaler_seen: bool = False
    agent_scalars_step: int | None = None
    """First step of which the agent's own scalars came: a run with a scaler names it in each such step."""
    first_layers_step: int | None = None
    scale: float | None = None
    first_scale_step: int | None = None
    """Step of the first scale, where only scales are reported; -1 once there was a second."""
    evidence: dict[int, _Evidence] = {}
    skips: dict[int, bool] = {}
    bad_loss_steps: list[int] = []


class NonFinite:
    """See the module's first lines."""

    name = "non_finite"

    def __init__(self, defaults: NonFiniteDefaults | None = None) -> None:
        self._defaults = defaults or NonFiniteDefaults()
        self.quiet_steps = self._defaults.quiet_steps
        self._state = _State()

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """A breach when an item shows, or completes, a non-finite step."""
        if isinstance(item, FoldedLayers):
            self._take_layers(item, history)
        elif isinstance(item, FoldedScalars):
            self._take_scalars(item)
        else:
            self._take_event(item)
        if not self._state.evidence:
            return []
        breaches = [breach for step in sorted(self._state.evidence) if (breach := self._judge(step))]
        self._forget()
        return breaches

    def needs_all(self, block: FoldedBlock) -> bool:
        """See `base.Rule`."""
        return (
            bool(self._state.evidence)
            or has_nonfinite_loss(block)
            or not {GRAD_NORM, SCALE, SKIPPED}.isdisjoint(block.names)
        )

    def dump(self) -> bytes:
        """State as msgpack."""
        return msgspec.msgpack.encode(self._state)

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        state = msgspec.msgpack.decode(data, type=_State)
        if state.version == _VERSION:
            self._state = state

    def _take_event(self, item: FoldedEvent) -> None:
        if item.kind in ("exit", "exception"):
            self._finalise(before=None)
        if item.kind != "nonfinite_activation" or item.step is None:
            return
        evidence = self._evidence(item.step, item.time_s)
        if not evidence.modules:
            evidence.modules = [str(name) for name in item.attributes.get("modules", ())][:MAX_NAMED_LAYERS]
            evidence.module_rank = item.rank

    def _take_layers(self, item: FoldedLayers, history: LayerHistory) -> None:
        bad_L = nonfinite_layers(item)
        if self._state.first_layers_step is None:
            self._state.first_layers_step = item.step
        self._finalise(before=item.step - self._defaults.hold_steps)
        if not bad_L.any():
            return
        backward = np.nonzero(bad_L)[0][::-1]
        evidence = self._evidence(item.step, item.time_s)
        evidence.layers = [item.layout.names[index] for index in backward[:MAX_NAMED_LAYERS]]
        evidence.num_layers = len(backward)
        evidence.all_layers = bool((bad_L | is_absent(item.statistics["norm"])).all()) and len(backward) > 1
        by_rank = item.num_nonfinite_by_rank
        evidence.layer_ranks = sorted(rank for rank, counts_L in by_rank.items() if (counts_L > 0).any())
        evidence.suspect = history.fastest_growing(item.layout) if evidence.all_layers else None

    def _take_scalars(self, item: FoldedScalars) -> None:
        state, values = self._state, item.values
        self._take_scaler(item)
        if any(name.startswith(_AGENT_GROUPS) for name in values):
            # Only these prove that the scaler's word would be here: a loss travels in another frame. Even theirs may,
            # because the agent does not report the same columns in every step.
            self._finalise(before=item.step - (self._defaults.hold_steps if state.scaler_seen else 0))
            if state.agent_scalars_step is None:
                state.agent_scalars_step = item.step
        losses = set(nonfinite_losses(values))
        for name, by_rank in item.by_rank.items():
            losses.update(
                nonfinite_losses({name: value})[0] for value in by_rank.values() if _bad_loss(name, value)
            )
        if losses:
            self._take_losses(item, sorted(losses))
        norm = values.get(GRAD_NORM)
        overflowed = norm == math.inf and values.get(GRAD_NUM_NONFINITE) == 0
        if norm is not None and not math.isfinite(norm) and not overflowed:
            self._evidence(item.step, item.time_s).grad_norm = norm

    def _take_scaler(self, item: FoldedScalars) -> None:
        state = self._state
        skipped = skipped_step(item.values, state.scale)
        if SKIPPED not in item.values and SCALE in item.values:
            self._take_first_scale(item.step, fell=bool(skipped))
        state.scale = item.values.get(SCALE, state.scale)
        state.scaler_seen |= SKIPPED in item.values or SCALE in item.values
        if skipped is None:
            return
        state.skips[item.step] = skipped
        if item.step in state.evidence:
            state.evidence[item.step].skipped = skipped
        while len(state.skips) > 2 * self._defaults.hold_steps:
            del state.skips[min(state.skips)]

    def _take_first_scale(self, step: int, *, fell: bool) -> None:
        """The first report of a scale tells of no skip. If the next is lower, the search had begun with that step."""
        state = self._state
        if state.first_scale_step is None:
            state.first_scale_step = step
        elif state.first_scale_step >= 0 and step > state.first_scale_step:
            evidence = state.evidence.get(state.first_scale_step)
            if evidence is not None and evidence.skipped is None and fell:
                evidence.skipped = True
            state.first_scale_step = -1

    def _take_losses(self, item: FoldedScalars, losses: list[str]) -> None:
        evidence = self._evidence(item.step, item.time_s)
        for name in losses:
            ranks = item.by_rank.get(name, {})
            bad = {rank: value for rank, value in sorted(ranks.items()) if not math.isfinite(value)}
            evidence.loss_ranks = sorted({*evidence.loss_ranks, *bad})
            evidence.losses[name] = next(iter(bad.values()), item.values.get(name, math.nan))
        if item.step not in self._state.bad_loss_steps:
            self._state.bad_loss_steps = sorted([*self._state.bad_loss_steps, item.step])[-8:]

    def _judge(self, step: int) -> Breach | None:
        evidence = self._state.evidence[step]
        bad_gradient = bool(evidence.num_layers) or evidence.grad_norm is not None
        if not (evidence.losses or bad_gradient) or self._must_wait(evidence):
            return None
        severity = self._severity(evidence)
        if severity is None:
            return None
        breach = self._breach(evidence, severity)
        said = [severity.value, *breach.facts, *breach.layers, *map(str, breach.ranks)]
        if said == evidence.emitted:
            return None
        evidence.emitted = said
        return breach

    def _must_wait(self, evidence: _Evidence) -> bool:
        """Whether the scaler's word on this step is still to come: scalars may arrive after layers."""
        state = self._state
        if evidence.final or evidence.skipped is not None:
            return False
        if state.scaler_seen:
            return True
        if evidence.losses:
            return False
        reported, layered = state.agent_scalars_step, state.first_layers_step
        if layered is None and not evidence.modules:
            return False  # Somebody else's gradient norm: no agent watches, so nobody tells of a scaler.
        known = reported is not None and reported < evidence.step
        settled = layered is not None and evidence.step - layered >= self._defaults.hold_steps
        return not (known or settled)

    def _severity(self, evidence: _Evidence) -> Severity | None:
        if not evidence.skipped:
            return Severity.CRITICAL
        if not evidence.losses:
            return None
        since = evidence.step - self._defaults.isolation_steps
        repeated = any(since <= step < evidence.step for step in self._state.bad_loss_steps)
        return Severity.CRITICAL if repeated else Severity.WARNING

    def _breach(self, evidence: _Evidence, severity: Severity) -> Breach:
        origin, layers = _origin(evidence)
        metric, value = next(iter(evidence.losses.items()), (GRAD_NORM, evidence.grad_norm))
        if value is None:
            value = math.nan
        ranks = [*evidence.loss_ranks, *evidence.layer_ranks]
        if origin == "forward":
            ranks = [evidence.module_rank, *ranks]
        return Breach(
            rule=self.name,
            severity=severity,
            step=evidence.step,
            time_s=evidence.time_s,
            metric=metric,
            value=value,
            layers=layers,
            num_layers=evidence.num_layers or len(layers),
            ranks=tuple(dict.fromkeys(ranks)),
            origin=origin,
            facts=tuple(_facts(evidence)),
        )

    def _evidence(self, step: int, time_s: float) -> _Evidence:
        if step not in self._state.evidence:
            skipped = self._state.skips.get(step)
            self._state.evidence[step] = _Evidence(step=step, time_s=time_s, skipped=skipped)
        return self._state.evidence[step]

    def _finalise(self, *, before: int | None) -> None:
        for step, evidence in self._state.evidence.items():
            if before is None or step < before:
                evidence.final = True

    def _forget(self) -> None:
        """Keep a few steps: what is late by more has nothing to add."""
        evidence = self._state.evidence
        while len(evidence) > 2 * self._defaults.hold_steps:
            del evidence[min(evidence)]


def _bad_loss(name: str, value: float) -> bool:
    return bool(nonfinite_losses({name: value}))


def _origin(evidence: _Evidence) -> tuple[str, tuple[str, ...]]:
    """How the first layer was found, and the layers with that one in front."""
    if evidence.modules:
        return "forward", _named([*evidence.modules[:1], *evidence.layers])
    if evidence.all_layers:
        # The loss itself was non-finite, so backward made every gradient so: depth order tells nothing here.
        if evidence.suspect is None:
            return "", _named(evidence.layers)
        return "growth", _named([evidence.suspect[0], *evidence.layers])
    return ("backward", _named(evidence.layers)) if evidence.layers else ("", ())


def _named(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))[:MAX_NAMED_LAYERS]


def _facts(evidence: _Evidence) -> list[str]:
    facts = []
    if evidence.modules:
        more = len(evidence.modules) - 1
        facts.append(
            f"the output of {evidence.modules[0]} was the first that was not finite"
            + (f", {more} more modules followed" * (more > 0))
        )
    for name, value in evidence.losses.items():
        ranks = f" on rank {', '.join(map(str, evidence.loss_ranks))}" if evidence.loss_ranks else ""
        facts.append(f"{name} is {number_text(value)}{ranks}")
    if evidence.all_layers:
        facts.append(f"the gradients of all {evidence.num_layers} layers are not finite")
        if evidence.suspect is not None and not evidence.modules:
            name, growth = evidence.suspect
            facts.append(
                f"the gradient norm of {name} had grown {number_text(growth)}-fold in the last 20 steps"
            )
    elif evidence.num_layers:
        noun = "layer is" if evidence.num_layers == 1 else "layers are"
        facts.append(
            f"the gradients of {evidence.num_layers} {noun} not finite, {evidence.layers[0]} first in backward"
        )
    elif evidence.grad_norm is not None:
        facts.append(f"{GRAD_NORM} is {number_text(evidence.grad_norm)}")
    if evidence.skipped:
        facts.append("the gradient scaler skipped the step")
    elif evidence.skipped is False and (evidence.num_layers or evidence.grad_norm is not None):
        facts.append("the step was not skipped, so the weights took it in")
    return facts
