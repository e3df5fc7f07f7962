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
from statistics import median

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import (
    Pace,
    Window,
    all_bounded,
    bounded,
    key_of,
)
from gradiometer_server.alerting.rules.loss_rule import LossRule, LossState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedScalars
from gradiometer_server.domain.names import GRAD_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpikeDefaults:
    """Defaults of the rule.

    Attributes:
        level_values: values whose median is the level.
        window, min_history: values over their level that make the noise, and how many are needed.
        z: robust standard deviations above the level.
        least_share, least: smallest excess that matters: a share of the level, and an absolute one.
        outlier_factor: how far beyond the run's own largest excess a value must be.
        memory_values: after so many values half of that largest excess is forgotten, `forget_every` values at a time.
        sure_share, sure_factor: an excess of this share of the level, and so far beyond the largest, is a warning at once.
        lasting_steps: reported steps that stay out; more is an error.
        hold_steps: after so many a higher loss is the new level, and rule `loss_divergence` judges it.
        cold_values: without enough history so many values are needed. Where the log begins far from step 0, and so no
            start of a training can be the reason, `cold_values_alone` are enough, and `cold_values_backed` if the gradient
            norm of the same row is `norm_ratio` times its median: a few values say little of their own noise.
        cold_share, cold_factor: then the excess over all values must be this factor of their range, and the excess over
            their median this share of it.
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
    forget_every: int = 100
    sure_share: float = 1 / 3
    sure_factor: float = 3.0
    lasting_steps: int = 20
    hold_steps: int = 64
    cold_values: int = 16
    cold_values_alone: int = 8
    cold_values_backed: int = 3
    norm_ratio: float = 2.0
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
    norms: list[float] = []
    """Gradient norms of the first rows."""
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


class _State(LossState, kw_only=True):
    series: dict[str, _Series] = msgspec.field(default_factory=dict)


class LossSpike(LossRule[_State]):
    """See the module's first lines."""

    name = "loss_spike"

    def __init__(self, defaults: LossSpikeDefaults | None = None) -> None:
        self._defaults = defaults or LossSpikeDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)
        self._windows: dict[str, tuple[Window, Window]] = {}
        self._kept = 0.5 ** (self._defaults.forget_every / self._defaults.memory_values)
        """Part of the largest excess that is kept each time."""

    def known_again(self, name: str) -> None:
        """See `LossRule`."""
        self._windows.pop(name, None)

    def after(self, name: str, steps_S: NDArray[np.int64], values_S: NDArray[np.float64]) -> _Series | None:
        """The series after usual values; None if one of them may be out, or too little is known."""
        series, defaults = self._state.series[name], self._defaults
        level_window, noise = self._window(name)
        known = len(level_window) >= defaults.level_values and len(noise) >= defaults.min_history
        steady = series.bound is None and series.pace.is_steady(steps_S)
        if not (known and steady and all_bounded(values_S)):
            return None
        size = defaults.level_values
        all_values = np.concatenate((level_window.values, values_S))
        upper = size // 2
        ordered = np.partition(sliding_window_view(all_values, size)[:-1], (upper - 1, upper), axis=1)
        level_S = 0.5 * (ordered[:, upper - 1] + ordered[:, upper])
        excess_S = values_S - level_S
        largest_S, largest = self._largest(series, excess_S)
        least_S = np.maximum(defaults.least_share * np.abs(level_S), defaults.least)
        if (values_S >= level_S + np.maximum(least_S, defaults.outlier_factor * largest_S)).any():
            return None
        return msgspec.structs.replace(
            series,
            pace=msgspec.structs.replace(series.pace, last_step=int(steps_S[-1])),
            values=all_values[-size:].tolist(),
            excesses=[*noise.values, *excess_S[-defaults.window :].tolist()][-defaults.window :],
            largest=largest,
            count=series.count + len(values_S),
            lowest=min(series.lowest, float(values_S.min())),
            highest=max(series.highest, float(values_S.max())),
        )

    def _largest(self, series: _Series, excess_S: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        """The largest excess before each value (S,), and after the last."""
        before_S, largest, row = np.empty(len(excess_S)), series.largest, 0
        while row < len(excess_S):
            # Up to the next value at which a part is forgotten, it can only grow.
            stop = min(row + (-(series.count + row + 1)) % self._defaults.forget_every, len(excess_S))
            grown = np.maximum.accumulate(np.concatenate(([largest], excess_S[row:stop])))
            before_S[row:stop], largest = grown[:-1], float(grown[-1])
            if stop < len(excess_S):
                before_S[stop] = largest
                largest = max(largest * self._kept, float(excess_S[stop]))
            row = stop + 1
        return before_S, largest

    def dump(self) -> bytes:
        """State as msgpack."""
        for name, (level, noise) in self._windows.items():
            self._state.series[name].values = level.values
            self._state.series[name].excesses = noise.values
        return super().dump()

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        super().load(data)
        self._windows = {}

    def _window(self, name: str) -> tuple[Window, Window]:
        if name not in self._windows:
            series, defaults = self._state.series[name], self._defaults
            self._windows[name] = (
                Window(defaults.level_values, series.values),
                Window(defaults.window, series.excesses),
            )
        return self._windows[name]

    def forget(self, name: str) -> None:
        """A marker: what was usual before it says nothing of what comes."""
        series = self._state.series[name]
        self._state.series[name] = _Series(pace=series.pace, has_restarted=True)
        self._windows.pop(name, None)

    def take(self, item: FoldedScalars, name: str) -> Breach | None:
        series = self._state.series.setdefault(name, _Series())
        value = bounded(item.values[name])
        if item.step <= series.pace.last_step:
            return None
        if series.pace.take(item.step):
            self.forget(name)
            series = self._state.series[name]
        if value is None:
            return None
        backed = self._is_backed(series, item.values.get(GRAD_NORM))
        bound = self._bound(series, name, value, backed=backed)
        breach = self._judged(item, name, series, value, bound)
        self._push(series, name, value, bound)
        return breach

    def _bound(self, series: _Series, name: str, value: float, *, backed: bool | None) -> float | None:
        """What `value` must reach to be out; None: too little is known."""
        level_window, noise = self._window(name)
        defaults = self._defaults
        if len(noise) < defaults.min_history:
            return self._cold_bound(series, name, backed=backed)
        # Hot path: a usual value is within this bound, and the dearer one by the noise is not needed.
        level = level_window.median()
        least = max(defaults.least_share * abs(level), defaults.least)
        bound = level + max(least, defaults.outlier_factor * series.largest)
        if value < bound:
            return bound
        return max(bound, level + noise.median() + defaults.z * noise.deviation())

    def _cold_bound(self, series: _Series, name: str, *, backed: bool | None) -> float | None:
        defaults = self._defaults
        needed = defaults.cold_values
        if series.pace.began_midway and not series.has_restarted:
            if backed:
                needed = defaults.cold_values_backed
            elif backed is None and series.lowest >= 0:
                needed = defaults.cold_values_alone
        if series.count < needed:
            return None
        spread = defaults.cold_factor * (series.highest - series.lowest)
        level = self._window(name)[0].median()
        least = max(defaults.cold_share * abs(level), defaults.least)
        return max(series.highest + spread, level + least)

    def _is_backed(self, series: _Series, norm: float | None) -> bool | None:
        """Whether the gradient norm of an early row tells the same as its loss; None: norms are not logged with it."""
        if series.count >= self._defaults.cold_values or norm is None or not math.isfinite(norm):
            return None if not series.norms else False
        known = series.norms
        series.norms = [*known, norm]
        return len(known) > 1 and norm >= self._defaults.norm_ratio * median(known)

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
            forgets = (series.count + 1) % defaults.forget_every == 0
            series.largest = max(series.largest * (self._kept if forgets else 1.0), excess)
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
