"""Rule `loss_zero`: a loss that was well above 0 is exactly 0, step after step. That is no success.

Some trainers write 0, or a running mean, where the loss was NaN; then the gradient norm is NaN or missing. Or every
label is masked. A loss that is always 0 is not judged without such a norm: in reinforcement learning it may be so by
construction, and a loss that has come close to 0 may be rounded to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import column, judged_losses, key_of
from gradiometer_server.alerting.rules.scalar_rule import ScalarRule, ScalarState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedScalars
from gradiometer_server.domain.names import GRAD_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class LossZeroDefaults:
    """Defaults of the rule.

    Attributes:
        after_steps: consecutive reported steps whose loss is exactly 0.
        masked_steps: so many are enough if the gradient norm is NaN or infinite in them.
        level_values, least_level: the median of so many losses before must have been at least this.
        repeat_steps: a lasting state is reported again each so many steps; it must be below `quiet_steps`.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    after_steps: int = 5
    masked_steps: int = 2
    level_values: int = 8
    least_level: float = 0.05
    repeat_steps: int = 10
    quiet_steps: int = 20


class _Series(msgspec.Struct, kw_only=True):
    last_step: int = -1
    values: list[float] = []
    """The last losses that were not 0."""
    num_zero: int = 0
    since: int = 0


class _State(ScalarState, kw_only=True):
    series: dict[str, _Series] = msgspec.field(default_factory=dict)
    bad_norm_step: int = -1
    """The last step whose gradient norm was not finite."""
    num_bad_norms: int = 0
    """How many in a row."""


class LossZero(ScalarRule[_State]):
    """See the module's first lines."""

    name = "loss_zero"
    reads = frozenset({GRAD_NORM})
    reads_losses = True

    def __init__(self, defaults: LossZeroDefaults | None = None) -> None:
        self._defaults = defaults or LossZeroDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)

    def judge(self, item: FoldedScalars) -> list[Breach]:
        """A breach when a loss has been 0 for long enough, and each `repeat_steps` while it is."""
        state = self._state
        norm = item.values.get(GRAD_NORM)
        if norm is not None:
            is_bad = not math.isfinite(norm)
            state.num_bad_norms = state.num_bad_norms + 1 if is_bad else 0
            state.bad_norm_step = item.step if is_bad else state.bad_norm_step
        breaches = [self._take(item, name) for name in judged_losses(item.values, state.series)]
        return [breach for breach in breaches if breach is not None]

    def take_block(self, block: FoldedBlock) -> bool:
        """See `base.TakesBlocks`."""
        series = self._state.series
        names = judged_losses(dict.fromkeys(block.names, 0.0), series)
        if GRAD_NORM in block.names or not series.keys() >= set(names):
            return False
        first, size = int(block.steps_S[0]), self._defaults.level_values
        for name in names:
            values_S = column(block, name)
            if first <= series[name].last_step or not (np.isfinite(values_S) & (values_S != 0.0)).all():
                return False
        for name in names:
            one = series[name]
            one.last_step, one.num_zero = int(block.steps_S[-1]), 0
            one.values = [*one.values, *column(block, name)[-size:].tolist()][-size:]
        return True

    def _take(self, item: FoldedScalars, name: str) -> Breach | None:
        series, value = self._state.series.setdefault(name, _Series()), item.values[name]
        if item.step <= series.last_step:
            return None
        series.last_step = item.step
        if value != 0.0:
            series.num_zero = 0
            if math.isfinite(value):
                series.values = [*series.values, value][-self._defaults.level_values :]
            return None
        series.since = item.step if series.num_zero == 0 else series.since
        series.num_zero += 1
        over = series.num_zero - self._needed(series)
        if over < 0 or over % self._defaults.repeat_steps:
            return None
        return self._breach(item, name, series)

    def _is_masked(self, series: _Series) -> bool:
        """Whether the gradient norm says that the loss was not a number."""
        state = self._state
        return state.num_bad_norms >= self._defaults.masked_steps and state.bad_norm_step >= series.since

    def _needed(self, series: _Series) -> float:
        """So many steps of 0 are a breach; infinite: none."""
        if self._is_masked(series):
            return self._defaults.masked_steps
        known = len(series.values) >= self._defaults.level_values
        if not known or median(series.values) < self._defaults.least_level:
            return math.inf
        return self._defaults.after_steps

    def _breach(self, item: FoldedScalars, name: str, series: _Series) -> Breach:
        before = median(series.values) if series.values else None
        facts = [f"{name} has been exactly 0 since step {series.since}"]
        if before is not None:
            facts.append(f"it was {number_text(before)} before")
        if self._is_masked(series):
            facts.append(f"{GRAD_NORM} is not finite")
        return Breach(
            rule=self.name,
            key=key_of(name),
            severity=Severity.ERROR,
            step=item.step,
            time_s=item.time_s,
            metric=name,
            value=0.0,
            baseline=before,
            facts=tuple(facts),
        )
