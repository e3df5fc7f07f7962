"""Rule `loss_rise`: the loss has stepped up or creeps up, too little for an alarm; worth a look.

A cumulative sum of what each value is above the level before, in standard deviations of the noise between
neighbours, less one: noise alone does not add up. The level stands still while the sum grows. Data replayed after a
resume shows like this within a few values. Only for the first values of a run, so in effect for logs of few values:
with more, the means of rule `loss_divergence` are surer. Always an info: a change of the data does the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import (
    LEARNING_RATE,
    Pace,
    Window,
    bounded,
    judged_losses,
    key_of,
)
from gradiometer_server.alerting.rules.loss_rule import LossRule, LossState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedScalars


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRiseDefaults:
    """Defaults of the rule.

    Attributes:
        level_values: values whose median is the level.
        noise_values: changes from value to value that make the noise.
        min_history: values before the rule judges.
        allowance, limit: standard deviations that are taken off each value, and the sum that is a breach.
        most: standard deviations that one value can add, so that a single spike is none.
        least_share: the median of the values in the sum must be above the level by this share of it.
        give_up_values: a sum that has not reached the limit after so many values is dropped.
        max_values: values that are judged, from the start.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    level_values: int = 8
    noise_values: int = 32
    min_history: int = 16
    allowance: float = 1.0
    limit: float = 10.0
    most: float = 4.0
    least_share: float = 0.05
    give_up_values: int = 32
    max_values: int = 200
    quiet_steps: int = 50


class _Series(msgspec.Struct, kw_only=True):
    pace: Pace = msgspec.field(default_factory=Pace)
    total: int = 0
    """Values since the start."""
    count: int = 0
    """Values since its history began."""
    values: list[float] = []
    changes: list[float] = []
    last: float = 0.0
    sum: float = 0.0
    since: int = 0
    raised: list[float] = []
    """Values that made the sum."""
    negative: bool = False


class _State(LossState, kw_only=True):
    series: dict[str, _Series] = msgspec.field(default_factory=dict)


class LossRise(LossRule[_State]):
    """See the module's first lines."""

    name = "loss_rise"

    def __init__(self, defaults: LossRiseDefaults | None = None) -> None:
        self._defaults = defaults or LossRiseDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)
        self._windows: dict[str, tuple[Window, Window]] = {}

    def needs_all(self, block: FoldedBlock) -> bool:
        """See `base.Rule`."""
        return LEARNING_RATE in block.names or self._follows(block)

    def take_block(self, block: FoldedBlock) -> bool:
        """See `base.TakesBlocks`; for when no loss is followed any more."""
        if self._follows(block) or not self._state.schedule.is_usual(block):
            return False
        self._state.schedule.take_block(block)
        return True

    def _follows(self, block: FoldedBlock) -> bool:
        series = self._state.series
        names = judged_losses(dict.fromkeys(block.names, 0.0), series)
        return any(name not in series or self._goes_on(name) for name in names)

    def _goes_on(self, name: str) -> bool:
        return self._state.series[name].total < self._defaults.max_values

    def dump(self) -> bytes:
        """State as msgpack."""
        for name, (level, noise) in self._windows.items():
            self._state.series[name].values = level.values
            self._state.series[name].changes = noise.values
        return super().dump()

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        super().load(data)
        self._windows = {}

    def _window(self, name: str) -> tuple[Window, Window]:
        if name not in self._windows:
            series = self._state.series[name]
            self._windows[name] = (
                Window(self._defaults.level_values, series.values),
                Window(self._defaults.noise_values, series.changes),
            )
        return self._windows[name]

    def forget(self, name: str) -> None:
        before = self._state.series[name]
        self._state.series[name] = _Series(pace=before.pace, negative=before.negative, total=before.total)
        self._windows.pop(name, None)

    def take(self, item: FoldedScalars, name: str) -> Breach | None:
        series = self._state.series.setdefault(name, _Series())
        value = bounded(item.values[name])
        if item.step <= series.pace.last_step or series.total >= self._defaults.max_values:
            return None
        series.total += 1
        if series.pace.take(item.step):
            self.forget(name)
            series = self._state.series[name]
        series.negative |= value is not None and value < 0
        if value is None or series.negative:
            return None
        level, noise = self._window(name)
        breach = (
            self._judged(item, name, series, value) if series.count >= self._defaults.min_history else None
        )
        if series.count:
            noise.push(value - series.last)
        if not series.raised:
            level.push(value)  # While the sum grows the level must not follow it.
        series.count, series.last = series.count + 1, value
        return breach

    def _judged(self, item: FoldedScalars, name: str, series: _Series, value: float) -> Breach | None:
        # Hot path: a value at or below its level costs one comparison.
        defaults, (level_window, noise) = self._defaults, self._window(name)
        level = level_window.median()
        if value <= level and not series.raised:
            return None
        deviation = noise.deviation() / math.sqrt(2)
        if deviation <= 0:
            return None
        score = min((value - level) / deviation, defaults.most) - defaults.allowance
        series.since = item.step if not series.raised else series.since
        series.sum = max(0.0, series.sum + score)
        series.raised = [*series.raised, value] if series.sum > 0 else []
        if series.sum < defaults.limit and len(series.raised) < defaults.give_up_values:
            return None
        middle = sorted(series.raised)[len(series.raised) // 2]
        reached = (
            series.sum >= defaults.limit
            and middle - level >= defaults.least_share * abs(level)
            # The first may still be on its way up.
            and min(series.raised[1:], default=level) > max(level_window.values)
        )
        if not reached and len(series.raised) < defaults.give_up_values:
            return None
        breach = self._breach(item, name, series, level, middle) if reached else None
        series.sum, series.raised = 0.0, []
        level_window.clear()
        level_window.push(middle)
        return breach

    def _breach(self, item: FoldedScalars, name: str, series: _Series, level: float, middle: float) -> Breach:
        return Breach(
            rule=self.name,
            key=key_of(name),
            severity=Severity.INFO,
            step=item.step,
            time_s=item.time_s,
            metric=name,
            value=middle,
            baseline=level,
            threshold=level + self._defaults.least_share * abs(level),
            facts=(
                f"{name} is around {number_text(middle)} since step {series.since}",
                f"it was around {number_text(level)} before",
            ),
        )
