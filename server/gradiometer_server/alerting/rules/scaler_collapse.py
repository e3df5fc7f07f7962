"""Rule `scaler_collapse`: the loss scale falls and falls because some layer overflows in every step.

A healthy scaler halves once in a while and searches its scale at the start; neither may alert. What alerts is a row
of skipped steps, a scale below 1, or a fall by 2**10 within 100 steps, after the start-up search has ended.
"""

from __future__ import annotations

import math
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
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedEvent, FoldedLayers, FoldedScalars, FoldedStep

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerCollapseDefaults:
    """Defaults of the rule.

    Attributes:
        warning_skips, critical_skips: skipped steps in a row, once a step has succeeded.
        fall_factor, fall_steps: a fall of the scale that is an error.
        minimum_scale: below it small gradients round to zero in float16: critical.
        startup_info_scale: a first search that has come down to this scale is worth an info.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    warning_skips: int = 4
    critical_skips: int = 10
    fall_factor: float = 2.0**10
    fall_steps: int = 100
    minimum_scale: float = 1.0
    startup_info_scale: float = 64.0
    quiet_steps: int = 50


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    last_step: int = -1
    clean_seen: bool = False
    skips_in_row: int = 0
    row_scale: float | None = None
    """Scale before the current row of skips."""
    initial_scale: float | None = None
    scale: float | None = None
    scales: list[tuple[int, float]] = []
    """(step, scale) at each change within the last 100 steps, oldest first."""
    bad_loss_steps: list[int] = []
    overflow_step: int = -1
    overflow_layers: list[str] = []
    overflow_ranks: list[int] = []
    num_overflow_layers: int = 0
    modules: dict[int, str] = {}


class ScalerCollapse:
    """See the module's first lines."""

    name = "scaler_collapse"

    def __init__(self, defaults: ScalerCollapseDefaults | None = None) -> None:
        self._defaults = defaults or ScalerCollapseDefaults()
        self.quiet_steps = self._defaults.quiet_steps
        self._state = _State()

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """At most one breach for each skipped step."""
        if isinstance(item, FoldedLayers):
            self._take_layers(item)
        elif isinstance(item, FoldedEvent):
            self._take_event(item)
        else:
            return self._take_scalars(item)
        return []

    def needs_all(self, block: FoldedBlock) -> bool:
        """See `base.Rule`."""
        return has_nonfinite_loss(block) or not {SCALE, SKIPPED}.isdisjoint(block.names)

    def dump(self) -> bytes:
        """State as msgpack."""
        return msgspec.msgpack.encode(self._state)

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        state = msgspec.msgpack.decode(data, type=_State)
        if state.version == _VERSION:
            self._state = state

    def _take_event(self, item: FoldedEvent) -> None:
        modules = item.attributes.get("modules") if item.kind == "nonfinite_activation" else None
        if modules and item.step is not None:
            self._state.modules[item.step] = str(modules[0])
            while len(self._state.modules) > self._defaults.critical_skips:
                del self._state.modules[min(self._state.modules)]

    def _take_layers(self, item: FoldedLayers) -> None:
        bad_L = nonfinite_layers(item)
        if item.step < self._state.overflow_step or not bad_L.any():
            return
        backward = np.nonzero(bad_L)[0][::-1]
        state = self._state
        state.overflow_step = item.step
        state.overflow_layers = [item.layout.names[index] for index in backward[:MAX_NAMED_LAYERS]]
        state.num_overflow_layers = len(backward)
        by_rank = item.num_nonfinite_by_rank
        state.overflow_ranks = sorted(rank for rank, counts_L in by_rank.items() if (counts_L > 0).any())

    def _take_scalars(self, item: FoldedScalars) -> list[Breach]:
        state = self._state
        if nonfinite_losses(item.values):
            state.bad_loss_steps = [*state.bad_loss_steps, item.step][-2 * self._defaults.critical_skips :]
        if not (SCALE in item.values or SKIPPED in item.values) or item.step <= state.last_step:
            return []
        skipped = bool(skipped_step(item.values, state.scale))
        self._count(item, skipped)
        severity = self._severity(item.step) if skipped else None
        return [] if severity is None else [self._breach(item, severity)]

    def _count(self, item: FoldedScalars, skipped: bool) -> None:
        state, scale = self._state, item.values.get(SCALE)
        state.last_step = item.step
        if skipped:
            state.row_scale = state.scale if state.skips_in_row == 0 else state.row_scale
            state.skips_in_row += 1
        else:
            # The first report of a run that sends no skip flag says nothing yet about a success.
            success = SKIPPED in item.values or state.scale is not None
            if success and not state.clean_seen:
                state.clean_seen, state.scales = (
                    True,
                    [],
                )  # The start-up search falls as far in a healthy run.
            state.skips_in_row = 0
        if scale is not None and math.isfinite(scale):
            self._take_scale(item.step, scale)

    def _take_scale(self, step: int, scale: float) -> None:
        state = self._state
        state.initial_scale = scale if state.initial_scale is None else state.initial_scale
        if scale != state.scale or not state.scales:
            state.scales.append((step, scale))
        state.scale = scale
        # The newest entry at or before the window's start still tells the scale at that start.
        start = step - self._defaults.fall_steps
        while len(state.scales) > 1 and state.scales[1][0] <= start:
            del state.scales[0]

    def _severity(self, step: int) -> Severity | None:
        state, defaults = self._state, self._defaults
        if any(step - state.skips_in_row < bad <= step for bad in state.bad_loss_steps):
            return None  # Skipped because of a non-finite loss: that incident belongs to rule `non_finite`.
        if state.scale is not None and state.scale < defaults.minimum_scale:
            return Severity.CRITICAL
        if not state.clean_seen:
            return self._startup_severity()
        if state.skips_in_row >= defaults.critical_skips:
            return Severity.CRITICAL
        if state.skips_in_row > 1 and self._fall() >= defaults.fall_factor:
            return Severity.ERROR
        return Severity.WARNING if state.skips_in_row >= defaults.warning_skips else None

    def _startup_severity(self) -> Severity | None:
        """The first search may skip up to log2(initial scale) steps, 16 for GradScaler's 65,536."""
        state = self._state
        allowed = math.log2(max(state.initial_scale or 65536.0, 2.0)) + 1
        if state.skips_in_row > allowed:
            return Severity.CRITICAL
        low = state.scale is not None and state.scale <= self._defaults.startup_info_scale
        return Severity.INFO if low and state.skips_in_row >= self._defaults.warning_skips else None

    def _fall(self) -> float:
        """By which factor the scale is below its highest of the window."""
        state = self._state
        if not state.scale or not state.scales:
            return 1.0
        return max(scale for _, scale in state.scales) / state.scale

    def _breach(self, item: FoldedScalars, severity: Severity) -> Breach:
        state = self._state
        module = state.modules.get(item.step)
        fresh = state.overflow_step > item.step - state.skips_in_row
        layers = tuple(state.overflow_layers) if fresh else ()
        return Breach(
            rule=self.name,
            severity=severity,
            step=item.step,
            time_s=item.time_s,
            metric=SCALE,
            value=state.scale,
            baseline=state.row_scale if state.row_scale is not None else state.initial_scale,
            threshold=self._defaults.minimum_scale,
            layers=tuple(dict.fromkeys((module, *layers)))[:MAX_NAMED_LAYERS] if module else layers,
            num_layers=state.num_overflow_layers if fresh else int(module is not None),
            ranks=tuple(state.overflow_ranks) if fresh else (),
            origin="forward" if module else ("backward" if layers else ""),
            facts=tuple(self._facts(layers, module)),
        )

    def _facts(self, layers: tuple[str, ...], module: str | None) -> list[str]:
        state, facts = self._state, []
        if module:
            facts.append(f"the output of {module} was not finite")
        if layers:
            facts.append(f"the gradient of {layers[0]} overflows first in backward")
        start = state.row_scale if state.row_scale is not None else state.initial_scale
        facts.append(f"{state.skips_in_row} steps in a row were skipped")
        if start is not None and state.scale is not None:
            facts.append(f"the loss scale fell from {number_text(start)} to {number_text(state.scale)}")
        if not state.clean_seen:
            facts.append("no step has succeeded since the start")
        return facts
