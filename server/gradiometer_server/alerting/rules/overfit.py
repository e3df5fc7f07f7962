"""Rule `overfit`: the loss on held-out data rises from one evaluation to the next while the training loss falls.

Always an info: to train on may be meant, and the checkpoint of the best evaluation is not lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import Window
from gradiometer_server.alerting.rules.scalar_rule import ScalarRule, ScalarState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedScalars

_TRAIN = ("train/loss", "loss")
_EVAL = ("eval/loss", "val/loss", "eval_loss", "val_loss", "validation/loss", "valid/loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverfitDefaults:
    """Defaults of the rule.

    Attributes:
        rises: evaluations in a row above the one before.
        least_rise: the last must be above the best by this share.
        least_fall: the training loss must have fallen by this share since the best evaluation.
        level_values: values whose median is the training loss.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    rises: int = 3
    least_rise: float = 0.01
    least_fall: float = 0.01
    level_values: int = 32
    quiet_steps: int = 1000


class _State(ScalarState, kw_only=True):
    train_step: int = -1
    eval_step: int = -1
    values: list[float] = msgspec.field(default_factory=list)
    last: float = math.inf
    rises: int = 0
    best: float = math.inf
    best_step: int = 0
    train_at_best: float | None = None


class Overfit(ScalarRule[_State]):
    """See the module's first lines."""

    name = "overfit"
    reads = frozenset({*_TRAIN, *_EVAL})

    def __init__(self, defaults: OverfitDefaults | None = None) -> None:
        self._defaults = defaults or OverfitDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)
        self._level = Window(self._defaults.level_values)

    def dump(self) -> bytes:
        """State as msgpack."""
        self._state.values = self._level.values
        return super().dump()

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        super().load(data)
        self._level = Window(self._defaults.level_values, self._state.values)

    def judge(self, item: FoldedScalars) -> list[Breach]:
        """A breach at an evaluation that is one too many above the one before."""
        state = self._state
        train = next((item.values[name] for name in _TRAIN if name in item.values), None)
        if train is not None and item.step > state.train_step and math.isfinite(train):
            state.train_step = item.step
            self._level.push(train)
        metric = next((name for name in _EVAL if name in item.values), None)
        if metric is None or item.step <= state.eval_step or not math.isfinite(item.values[metric]):
            return []
        state.eval_step = item.step
        return self._take(item, metric, item.values[metric])

    def _take(self, item: FoldedScalars, metric: str, value: float) -> list[Breach]:
        state, defaults = self._state, self._defaults
        state.rises = state.rises + 1 if value > state.last else 0
        state.last = value
        train = self._level.median() if len(self._level) else None
        if value < state.best:
            state.best, state.best_step, state.train_at_best = value, item.step, train
        if state.rises < defaults.rises or train is None or state.train_at_best is None:
            return []
        if value - state.best < defaults.least_rise * abs(state.best):
            return []
        if state.train_at_best - train < defaults.least_fall * abs(state.train_at_best):
            return []
        return [
            Breach(
                rule=self.name,
                severity=Severity.INFO,
                step=item.step,
                time_s=item.time_s,
                metric=metric,
                value=value,
                baseline=state.best,
                facts=(
                    f"{metric} is {number_text(value)} and was {number_text(state.best)} at step {state.best_step}",
                    f"the training loss went from {number_text(state.train_at_best)} to {number_text(train)} since",
                ),
            )
        ]
