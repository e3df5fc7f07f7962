"""Rule `loss_spike`: the loss of a step far above its recent level, by its own noise and by its own outliers.

The level is the median of the last 16 values, so that a falling loss and a noisy one are judged by what is left over
it. A value is out if it is 6 robust standard deviations above, and half as much again above the largest excess that
the run has shown: losses have hard batches, and each run its own. One such step alone is an info, because nobody can
tell a hard batch from trouble by one step; a second within three steps, or an excess beyond anything seen, is a
warning. Ratios are not used: a loss may be zero or negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import (
    LEARNING_RATE,
    Pace,
    Schedule,
    Window,
    has_judged_loss,
    judged_losses,
    key_of,
)
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedScalars, FoldedStep

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpikeDefaults:
    """Defaults of the rule.

    Attributes:
        level_values: values whose median is the level.
        window, min_history: values over their level that make the noise, and how many are needed.
        z: robust standard deviations above the level.
        least_share, least: smallest excess that matters: a share of the level, and an absolute one.
        outlier_factor: how far beyond the run's own largest excess a value must be.
        memory_values: after so many values half of that largest excess is forgotten.
        sure_share, sure_factor: an excess of this share of the level, and so far beyond the largest, is a warning at once.
        lasting_steps: reported steps that stay out; more is an error.
        hold_steps: after so many a higher loss is the new level, and rule `loss_divergence` judges it.
        cold_values, cold_values_midway, cold_share, cold_factor: without enough history: so many values are needed (fewer
            where the log begins far from step 0); the excess over all of them must be this factor of their
            range, and the excess over their median this share of it.
        quiet_steps: steps without a spike after which the episode resolves.
    """

    level_values: int = 16
    window: int = 128
    min_history: int = 48
    z: float = 6.0
    least_share: float = 0.05
    least: float = 0.05
    outlier_factor: float = 1.5
    memory_values: int = 1000
    sure_share: float = 1 / 3
    sure_factor: float = 3.0
    lasting_steps: int = 20
    hold_steps: int = 64
    cold_values: int = 16
    cold_values_midway: int = 3
    cold_share: float = 0.25
    cold_factor: float = 1.5
    quiet_steps: int = 20


class _Series(msgspec.Struct, kw_only=True):
    pace: Pace = msgspec.field(default_factory=Pace)
    values: list[float] = []
    excesses: list[float] = []
    largest: float = 0.0
    """Largest excess, of which half is forgotten after `memory_values`."""
    count: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    has_restarted: bool = False
    """Whether its history began anew within the run."""
    bound: float | None = None
    """While a spike goes on: what a value must reach to be part of it."""
    level: float = 0.0
    held: int = 0
    """Values since the spike began."""
    out: list[bool] = []
    """Which of the last three values were out."""
    num_out: int = 0
    is_sure: bool = False


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    schedule: Schedule = msgspec.field(default_factory=Schedule)
    series: dict[str, _Series] = {}


class LossSpike:
    """See the module's first lines."""

    name = "loss_spike"

    def __init__(self, defaults: LossSpikeDefaults | None = None) -> None:
        self._defaults = defaults or LossSpikeDefaults()
        self.quiet_steps = self._defaults.quiet_steps
        self._state = _State()
        self._windows: dict[str, tuple[Window, Window]] = {}

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """A breach for each value that is out."""
        if not isinstance(item, FoldedScalars):
            return []
        state = self._state
        if state.schedule.take(item.step, item.values):
            for name in state.series:
                self._forget(name)
        breaches = [self._take(item, name) for name in judged_losses(item.values, state.series)]
        return [breach for breach in breaches if breach is not None]

    def needs_all(self, block: FoldedBlock) -> bool:
        """See `base.Rule`."""
        return LEARNING_RATE in block.names or has_judged_loss(block)

    def dump(self) -> bytes:
        """State as msgpack."""
        for name, (level, noise) in self._windows.items():
            self._state.series[name].values = level.values
            self._state.series[name].excesses = noise.values
        return msgspec.msgpack.encode(self._state)

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        state = msgspec.msgpack.decode(data, type=_State)
        if state.version == _VERSION:
            self._state, self._windows = state, {}

    def _window(self, name: str) -> tuple[Window, Window]:
        if name not in self._windows:
            series, defaults = self._state.series[name], self._defaults
            self._windows[name] = (
                Window(defaults.level_values, series.values),
                Window(defaults.window, series.excesses),
            )
        return self._windows[name]

    def _forget(self, name: str) -> None:
        """A marker: what was usual before it says nothing of what comes."""
        series = self._state.series[name]
        self._state.series[name] = _Series(pace=series.pace, has_restarted=True)
        self._windows.pop(name, None)

    def _take(self, item: FoldedScalars, name: str) -> Breach | None:
        series = self._state.series.setdefault(name, _Series())
        value = item.values[name]
        if item.step <= series.pace.last_step:
            return None
        if series.pace.take(item.step):
            self._forget(name)
            series = self._state.series[name]
        if not math.isfinite(value):
            return None  # Rule `non_finite` has it; a baseline must not.
        bound = self._bound(series, name, value)
        breach = self._judged(item, name, series, value, bound)
        self._push(series, name, value, bound)
        return breach

    def _bound(self, series: _Series, name: str, value: float) -> float | None:
        """What `value` must reach to be out; None: too little is known."""
        level_window, noise = self._window(name)
        defaults = self._defaults
        if len(noise) < defaults.min_history:
            return self._cold_bound(series, name)
        # Hot path: a usual value is within this bound, and the dearer one by the noise is not needed.
        level = level_window.median()
        least = max(defaults.least_share * abs(level), defaults.least)
        bound = level + max(least, defaults.outlier_factor * series.largest)
        if value < bound:
            return bound
        return max(bound, level + noise.median() + defaults.z * noise.deviation())

    def _cold_bound(self, series: _Series, name: str) -> float | None:
        defaults = self._defaults
        midway = series.pace.began_midway and not series.has_restarted
        if series.count < (defaults.cold_values_midway if midway else defaults.cold_values):
            return None
        spread = defaults.cold_factor * (series.highest - series.lowest)
        level = self._window(name)[0].median()
        least = max(defaults.cold_share * abs(level), defaults.least)
        return max(series.highest + spread, level + least)

    def _judged(
        self, item: FoldedScalars, name: str, series: _Series, value: float, bound: float | None
    ) -> Breach | None:
        # Hot path: a usual value costs one comparison.
        if series.bound is None:
            if bound is None or value < bound:
                return None
            self._begin(series, name, bound)
        is_out = series.bound is not None and value >= series.bound
        series.held += 1
        series.out = [*series.out, is_out][-3:]
        if not any(series.out) or series.held > self._defaults.hold_steps:
            series.bound = None
            return None
        if not is_out:
            return None
        series.num_out += 1
        return self._breach(item, name, series, value)

    def _begin(self, series: _Series, name: str, bound: float) -> None:
        series.bound, series.level = bound, self._window(name)[0].median()
        series.held, series.out, series.num_out, series.is_sure = 0, [], 0, False

    def _push(self, series: _Series, name: str, value: float, bound: float | None) -> None:
        level_window, noise = self._window(name)
        defaults = self._defaults
        if len(level_window) >= defaults.level_values // 2:
            level = level_window.median()
            # What is out enters as the bound, so that noise that grows is learned and one spike is not.
            excess = (value if bound is None else min(value, bound)) - level
            noise.push(excess)
            series.largest = max(series.largest * 0.5 ** (1 / defaults.memory_values), excess)
        level_window.push(value)
        series.count += 1
        series.lowest, series.highest = min(series.lowest, value), max(series.highest, value)

    def _breach(self, item: FoldedScalars, name: str, series: _Series, value: float) -> Breach:
        bound = series.bound if series.bound is not None else value
        severity = self._severity(series, name, value)
        facts = [
            f"{name} is {number_text(value)}; the median of the last {len(self._window(name)[0])} values before is "
            f"{number_text(series.level)}"
        ]
        if series.num_out > 1:
            facts.append(f"{series.num_out} of the last {series.held} reported steps are out")
        return Breach(
            rule=self.name,
            key=key_of(name),
            severity=severity,
            step=item.step,
            time_s=item.time_s,
            metric=name,
            value=value,
            baseline=series.level,
            threshold=bound,
            facts=tuple(facts),
        )

    def _severity(self, series: _Series, name: str, value: float) -> Severity:
        defaults = self._defaults
        if series.num_out > defaults.lasting_steps:
            return Severity.ERROR
        excess = value - series.level
        cold = len(self._window(name)[1]) < defaults.min_history
        beyond = excess >= max(defaults.sure_share * abs(series.level), defaults.sure_factor * series.largest)
        series.is_sure |= cold or beyond or sum(series.out) > 1
        return Severity.WARNING if series.is_sure else Severity.INFO
