"""Rule `lr_anomaly`: a learning rate that is 0, negative, not a number, or jumps to where it never was.

Warm-ups, restarts of a schedule up to where it has been, and a last step at 0 are no anomalies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import LEARNING_RATE, all_bounded, column
from gradiometer_server.alerting.rules.scalar_rule import ScalarRule, ScalarState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedScalars


@dataclass(frozen=True, slots=True, kw_only=True)
class LrAnomalyDefaults:
    """Defaults of the rule.

    Attributes:
        zero_steps, zero_warning_steps: reported steps at exactly 0, after it was not: an info, and a warning.
        jump: factor from one report to the next.
        beyond: and factor over the highest so far.
        min_reports: no jump is judged before so many.
        repeat_steps: a lasting state is reported again each so many steps; it must be below `quiet_steps`.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    zero_steps: int = 10
    zero_warning_steps: int = 50
    jump: float = 10.0
    beyond: float = 2.0
    min_reports: int = 20
    repeat_steps: int = 10
    quiet_steps: int = 20


class _State(ScalarState, kw_only=True):
    last_step: int = -1
    lr: float | None = None
    rose: bool = False
    highest: float = 0.0
    count: int = 0
    num_zero: int = 0
    since: int = 0


class LrAnomaly(ScalarRule[_State]):
    """See the module's first lines."""

    name = "lr_anomaly"
    reads = frozenset({LEARNING_RATE})

    def __init__(self, defaults: LrAnomalyDefaults | None = None) -> None:
        self._defaults = defaults or LrAnomalyDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)

    def judge(self, item: FoldedScalars) -> list[Breach]:
        """A breach for what is wrong with the learning rate of this step."""
        state, lr = self._state, item.values.get(LEARNING_RATE)
        if lr is None or item.step <= state.last_step:
            return []
        state.last_step = item.step
        if not math.isfinite(lr) or lr < 0:
            fact = f"{LEARNING_RATE} is {number_text(lr)}"
            return [self._breach(item, "value", Severity.ERROR, lr, None, fact)]
        breach = self._zero(item) if lr == 0.0 else self._jumped(item, lr)
        state.count += 1
        if lr > 0.0:
            state.num_zero = 0
        state.rose = state.lr is not None and lr > state.lr
        state.lr, state.highest = lr, max(state.highest, lr)
        return [] if breach is None else [breach]

    def take_block(self, block: FoldedBlock) -> bool:
        """See `base.TakesBlocks`."""
        state, lr_S = self._state, column(block, LEARNING_RATE)
        if state.lr is None or state.lr <= 0 or int(block.steps_S[0]) <= state.last_step:
            return False
        before_S = np.concatenate(([state.lr], lr_S[:-1]))
        if not all_bounded(before_S) or not all_bounded(lr_S):
            return False
        if not ((lr_S > 0) & (lr_S < self._defaults.jump * before_S)).all():
            return False
        state.last_step, state.count, state.num_zero = int(block.steps_S[-1]), state.count + len(lr_S), 0
        state.rose = bool(lr_S[-1] > before_S[-1])
        state.lr, state.highest = float(lr_S[-1]), max(state.highest, float(lr_S.max()))
        return True

    def _zero(self, item: FoldedScalars) -> Breach | None:
        state, defaults = self._state, self._defaults
        if state.highest == 0.0:
            return None  # It may have been switched off, and warm-ups begin at 0.
        state.since = item.step if state.num_zero == 0 else state.since
        state.num_zero += 1
        over = state.num_zero - defaults.zero_steps
        if over < 0 or over % defaults.repeat_steps:
            return None
        long = state.num_zero >= defaults.zero_warning_steps
        severity = Severity.WARNING if long else Severity.INFO
        fact = f"{LEARNING_RATE} has been exactly 0 since step {state.since}"
        return self._breach(item, "zero", severity, 0.0, state.highest, fact)

    def _jumped(self, item: FoldedScalars, lr: float) -> Breach | None:
        state, defaults = self._state, self._defaults
        if not state.lr or state.count < defaults.min_reports or state.rose:
            return None
        if lr < defaults.jump * state.lr or lr < defaults.beyond * state.highest:
            return None
        fact = f"{LEARNING_RATE} went from {number_text(state.lr)} to {number_text(lr)} from one report to the next"
        return self._breach(item, "jump", Severity.WARNING, lr, state.lr, fact)

    def _breach(
        self,
        item: FoldedScalars,
        key: str,
        severity: Severity,
        value: float,
        baseline: float | None,
        fact: str,
    ) -> Breach:
        return Breach(
            rule=self.name,
            key=key,
            severity=severity,
            step=item.step,
            time_s=item.time_s,
            metric=LEARNING_RATE,
            value=value,
            baseline=baseline,
            facts=(fact,),
        )
