"""Rule `grad_explosion`: the gradient norm grows by a steady factor, without any single spike.

Works on log(norm): the medians of the four quarters of the last 200 values must rise one after the other, at a rate
of at least 0.01 per value, and the last must be above 5 times the smallest level that the run has had. A warm-up that
still goes on is exempt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import msgspec

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import LEARNING_RATE, Pace, Schedule
from gradiometer_server.alerting.rules.scalar_rule import ScalarRule, ScalarState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedScalars
from gradiometer_server.domain.names import GRAD_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class GradExplosionDefaults:
    """Defaults of the rule.

    Attributes:
        window: values that are looked at; none is judged before there are so many.
        rate: rise of log(norm) per value; 0.01 is a factor of 7 over the window.
        ratio: last quarter over the smallest level so far.
        every: values between two looks.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    window: int = 200
    rate: float = 0.01
    ratio: float = 5.0
    every: int = 10
    quiet_steps: int = 40


class _State(ScalarState, kw_only=True):
    schedule: Schedule = msgspec.field(default_factory=Schedule)
    pace: Pace = msgspec.field(default_factory=Pace)
    logs: list[float] = msgspec.field(default_factory=list)
    count: int = 0
    lowest: float = math.inf
    """Smallest median of a quarter so far."""


class GradExplosion(ScalarRule[_State]):
    """See the module's first lines."""

    name = "grad_explosion"
    reads = frozenset({LEARNING_RATE, GRAD_NORM})

    def __init__(self, defaults: GradExplosionDefaults | None = None) -> None:
        self._defaults = defaults or GradExplosionDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)

    def judge(self, item: FoldedScalars) -> list[Breach]:
        """A breach at each look that finds the growth."""
        state, defaults = self._state, self._defaults
        if state.schedule.take(item.step, item.values):
            self._forget()
        norm = item.values.get(GRAD_NORM)
        if norm is None or item.step <= state.pace.last_step:
            return []
        if state.pace.take(item.step):
            self._forget()
        if not math.isfinite(norm) or norm <= 0:
            return []
        state.logs.append(math.log(norm))
        del state.logs[: -defaults.window]
        state.count += 1
        if state.count % defaults.every or len(state.logs) < defaults.window:
            return []
        return self._look(item)

    def take_block(self, block: FoldedBlock) -> bool:
        """See `base.TakesBlocks`."""
        if GRAD_NORM in block.names or not self._state.schedule.is_usual(block):
            return False
        self._state.schedule.take_block(block)
        return True

    def _forget(self) -> None:
        self._state.logs, self._state.lowest = [], math.inf

    def _look(self, item: FoldedScalars) -> list[Breach]:
        state, defaults = self._state, self._defaults
        size = defaults.window // 4
        levels = [median(state.logs[start : start + size]) for start in range(0, 4 * size, size)]
        state.lowest = min(state.lowest, levels[0])
        steady = levels[0] < levels[1] < levels[2] < levels[3]
        fast = levels[3] - levels[0] >= defaults.rate * 3 * size
        if not (steady and fast and levels[3] - state.lowest >= math.log(defaults.ratio)):
            return []
        if state.schedule.rising:
            return []
        before, now = math.exp(levels[0]), math.exp(levels[3])
        return [
            Breach(
                rule=self.name,
                severity=Severity.WARNING,
                step=item.step,
                time_s=item.time_s,
                metric=GRAD_NORM,
                value=now,
                baseline=before,
                threshold=math.exp(state.lowest) * defaults.ratio,
                facts=(
                    f"{GRAD_NORM} is around {number_text(now)}",
                    f"it was around {number_text(before)} {3 * size} reported steps earlier",
                ),
            )
        ]
