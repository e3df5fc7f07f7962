"""Rule `loss_divergence`: the loss has been well above its best for long, and still rises.

No rule on single steps sees a drift of a thousandth per step. The loss is smoothed (an exponential mean of about 32
values) and compared with the smallest that this mean has been. A loss that is or was negative is not judged: there a
level says nothing about learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import (
    Pace,
    Window,
    all_bounded,
    bounded,
    deviation_of,
    key_of,
)
from gradiometer_server.alerting.rules.loss_rule import LossRule, LossState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedScalars


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDivergenceDefaults:
    """Defaults of the rule.

    Attributes:
        smooth_values: span of the exponential mean.
        min_history: values before a best is taken.
        share, noise: how far above its best the mean must be: a share of it, and standard deviations of the noise
            from one value to the next.
        noise_values: changes from value to value that make the noise; it is looked at anew after so many.
        after_values: for so many values in a row; twice as many are an error.
        rising_values: the mean must be higher than so many values before, by a tenth of what it is above its best.
        repeat_steps: a lasting state is reported again each so many steps; it must be below `quiet_steps`.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    smooth_values: int = 32
    min_history: int = 64
    share: float = 0.10
    noise: float = 6.0
    noise_values: int = 128
    after_values: int = 64
    rising_values: int = 32
    repeat_steps: int = 10
    quiet_steps: int = 50


class _Series(msgspec.Struct, kw_only=True):
    pace: Pace = msgspec.field(default_factory=Pace)
    count: int = 0
    last: float = 0.0
    mean: float = 0.0
    best: float = math.inf
    best_step: int = 0
    above: int = 0
    """Values in a row for which the mean has been too high."""
    means: list[float] = []
    """The mean after each of the last `rising_values`."""
    changes: list[float] = []
    noise: float = math.inf
    """What the noise alone may raise the mean by."""
    negative: bool = False


class _State(LossState, kw_only=True):
    series: dict[str, _Series] = msgspec.field(default_factory=dict)


class LossDivergence(LossRule[_State]):
    """See the module's first lines."""

    name = "loss_divergence"

    def __init__(self, defaults: LossDivergenceDefaults | None = None) -> None:
        self._defaults = defaults or LossDivergenceDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)
        self._changes: dict[str, Window] = {}

    def known_again(self, name: str) -> None:
        """See `LossRule`."""
        self._changes.pop(name, None)

    def after(self, name: str, steps_S: NDArray[np.int64], values_S: NDArray[np.float64]) -> _Series | None:
        """The series after values none of which is a breach; None if one is, or too little is known."""
        series, defaults = self._state.series[name], self._defaults
        if not series.pace.is_steady(steps_S):
            return None
        pace = msgspec.structs.replace(series.pace, last_step=int(steps_S[-1]))
        known = self._changes[name].values if name in self._changes else series.changes
        if series.negative:
            return msgspec.structs.replace(series, pace=pace, changes=list(known))
        if series.count < defaults.min_history or not all_bounded(values_S) or (values_S < 0).any():
            return None
        changes = [*known, *np.diff(np.concatenate(([series.last], values_S))).tolist()]
        after = msgspec.structs.replace(
            series, pace=pace, last=float(values_S[-1]), changes=changes[-defaults.noise_values :]
        )
        means, weight = list(series.means), self._weight(after.count + 1)
        mean, count = after.mean, after.count
        for row, value in enumerate(values_S.tolist()):
            mean += weight * (value - mean)
            count += 1
            means.append(mean)
            if count % defaults.noise_values == 0:
                end = len(known) + row + 1
                after.noise = self._noise_of(changes[max(0, end - defaults.noise_values) : end])
            if mean < after.best:
                after.best, after.best_step, after.above = mean, int(steps_S[row]), 0
            elif self._is_due(after, mean) and self._still_rises(
                after, mean, means[-defaults.rising_values - 1]
            ):
                return None
        after.mean, after.count = mean, count
        after.means = means[-defaults.rising_values - 1 :]
        return after

    def _weight(self, count: int) -> float:
        """A plain mean at first, so that the first value does not weigh on all that follow."""
        return max(2.0 / (self._defaults.smooth_values + 1), 1.0 / count)

    def _is_due(self, series: _Series, mean: float) -> bool:
        """Counts a value for which the mean is too high; whether there have been enough for a word."""
        rise = mean - series.best
        if rise < self._defaults.share * series.best or rise <= 0 or rise < series.noise:
            series.above = 0
            return False
        series.above += 1
        over = series.above - self._defaults.after_values
        return over >= 0 and over % self._defaults.repeat_steps == 0

    def _still_rises(self, series: _Series, mean: float, before: float) -> bool:
        """False: it was a step up that has ended, such as another mixture of data."""
        return mean - before >= 0.1 * (mean - series.best)

    def dump(self) -> bytes:
        """State as msgpack."""
        for name, changes in self._changes.items():
            self._state.series[name].changes = changes.values
        return super().dump()

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        super().load(data)
        self._changes = {}

    def forget(self, name: str) -> None:
        before = self._state.series[name]
        self._state.series[name] = _Series(pace=before.pace, negative=before.negative)
        self._changes.pop(name, None)

    def take(self, item: FoldedScalars, name: str) -> Breach | None:
        series = self._state.series.setdefault(name, _Series())
        value = bounded(item.values[name])
        if item.step <= series.pace.last_step:
            return None
        if series.pace.take(item.step):
            self.forget(name)
            series = self._state.series[name]
        series.negative |= value is not None and value < 0
        if value is None or series.negative:
            return None
        self._smooth(series, name, value)
        if series.count < self._defaults.min_history:
            return None
        if series.mean < series.best:
            series.best, series.best_step = series.mean, item.step
        return self._judged(item, name, series)

    def _smooth(self, series: _Series, name: str, value: float) -> None:
        if name not in self._changes:
            self._changes[name] = Window(self._defaults.noise_values, series.changes)
        if series.count:
            self._changes[name].push(value - series.last)
        series.last = value
        series.count += 1
        series.mean += self._weight(series.count) * (value - series.mean)
        series.means = [*series.means, series.mean][-self._defaults.rising_values - 1 :]
        if self._looks_at_noise(series.count):
            series.noise = self._noise_of(self._changes[name].values)

    def _judged(self, item: FoldedScalars, name: str, series: _Series) -> Breach | None:
        if not self._is_due(series, series.mean) or not self._still_rises(
            series, series.mean, series.means[0]
        ):
            return None
        late = series.above >= 2 * self._defaults.after_values
        return self._breach(item, name, series, Severity.ERROR if late else Severity.WARNING)

    def _looks_at_noise(self, count: int) -> bool:
        return count == self._defaults.min_history or count % self._defaults.noise_values == 0

    def _noise_of(self, changes: Sequence[float]) -> float:
        """The noise of one value is what two neighbours differ by, over the square root of 2."""
        return self._defaults.noise * deviation_of(changes) / math.sqrt(2)

    def _breach(self, item: FoldedScalars, name: str, series: _Series, severity: Severity) -> Breach:
        return Breach(
            rule=self.name,
            key=key_of(name),
            severity=severity,
            step=item.step,
            time_s=item.time_s,
            metric=name,
            value=series.mean,
            baseline=series.best,
            threshold=series.best + self._defaults.share * abs(series.best),
            facts=(
                f"the smoothed {name} is {number_text(series.mean)}",
                f"it was {number_text(series.best)} at step {series.best_step}",
                f"it has been above for {series.above} reported steps and still rises",
            ),
        )
