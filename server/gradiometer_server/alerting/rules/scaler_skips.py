"""Rule `scaler_skips`: the gradient scaler skips steps too often, or its scale has no bound.

A healthy scaler tries a doubled scale now and then, and skips the step where that overflows: a saw-tooth. Such skips
are expected and not counted. What counts are skips that no growth of the scale came before; a start-up search, before
the first step that succeeds, is exempt. A row of skips is the business of rule `scaler_collapse`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.scalar_rule import ScalarRule, ScalarState
from gradiometer_server.alerting.rules.scaler import SCALE, SKIPPED, skipped_step
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedScalars


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSkipsDefaults:
    """Defaults of the rule.

    Attributes:
        window_steps, min_reports: steps looked back on, and how many of them must have been reported.
        warning_share, error_share: unexpected skips among the reports.
        min_skips: fewer are chance.
        probe_skips: skips after a growth of the scale that belong to that attempt.
        max_scale: beyond it the scale grows because nothing overflows: the loss is tiny or its gradient is.
        repeat_steps: a lasting state is reported again each so many reports; it must be below `quiet_steps`.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    window_steps: int = 500
    min_reports: int = 200
    warning_share: float = 0.01
    error_share: float = 0.10
    min_skips: int = 4
    probe_skips: int = 2
    max_scale: float = 2.0**40
    repeat_steps: int = 20
    quiet_steps: int = 60


class _State(ScalarState, kw_only=True):
    last_step: int = -1
    scale: float | None = None
    clean_seen: bool = False
    allowed: int = 0
    """Skips that a growth of the scale still explains."""
    reports: list[int] = msgspec.field(default_factory=list)
    skips: list[int] = msgspec.field(default_factory=list)
    since_breach: dict[str, int] = msgspec.field(default_factory=dict)


class ScalerSkips(ScalarRule[_State]):
    """See the module's first lines."""

    name = "scaler_skips"
    reads = frozenset({SCALE, SKIPPED})

    def __init__(self, defaults: ScalerSkipsDefaults | None = None) -> None:
        self._defaults = defaults or ScalerSkipsDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)

    def judge(self, item: FoldedScalars) -> list[Breach]:
        """Breaches while the share is too high, and while the scale has no bound."""
        state = self._state
        if not (SCALE in item.values or SKIPPED in item.values) or item.step <= state.last_step:
            return []
        self._count(item)
        found = [self._unbounded(item), self._too_many(item)]
        return [breach for breach in found if breach is not None and self._is_due(breach.key)]

    def _count(self, item: FoldedScalars) -> None:
        state, scale = self._state, item.values.get(SCALE)
        skipped = skipped_step(item.values, state.scale)
        state.last_step = item.step
        if scale is not None and state.scale is not None and scale > state.scale:
            state.allowed = self._defaults.probe_skips
        if skipped is None and SKIPPED not in item.values and state.scale is None:
            state.scale = scale
            return
        state.scale = state.scale if scale is None else scale
        state.clean_seen |= not skipped
        if not state.clean_seen:
            return
        state.reports.append(item.step)
        if skipped and state.allowed > 0:
            state.allowed -= 1
        elif skipped:
            state.skips.append(item.step)
        start = item.step - self._defaults.window_steps
        for steps in (state.reports, state.skips):
            while steps and steps[0] <= start:
                steps.pop(0)

    def _is_due(self, key: str) -> bool:
        since = self._state.since_breach
        if key in since and self._state.last_step <= since[key]:
            return False
        since[key] = self._state.last_step
        return True

    def _too_many(self, item: FoldedScalars) -> Breach | None:
        state, defaults = self._state, self._defaults
        count, reports = len(state.skips), len(state.reports)
        if reports < defaults.min_reports or count < defaults.min_skips:
            return None
        share = count / reports
        if share <= defaults.warning_share or state.skips[-1] != item.step:
            return None
        severity = Severity.ERROR if share > defaults.error_share else Severity.WARNING
        return Breach(
            rule=self.name,
            severity=severity,
            step=item.step,
            time_s=item.time_s,
            metric=SCALE,
            value=share,
            threshold=defaults.warning_share,
            facts=(
                f"{count} of the last {reports} reported steps were skipped without a growth of the scale before",
            ),
        )

    def _unbounded(self, item: FoldedScalars) -> Breach | None:
        scale = item.values.get(SCALE)
        if scale is None or scale <= self._defaults.max_scale:
            return None  # A NaN is not above it, and is no scale.
        shown = "infinite" if math.isinf(scale) else number_text(scale)
        return Breach(
            rule=self.name,
            key="scale",
            severity=Severity.WARNING,
            step=item.step,
            time_s=item.time_s,
            metric=SCALE,
            value=scale,
            threshold=self._defaults.max_scale,
            facts=(f"the loss scale is {shown}",),
        )
