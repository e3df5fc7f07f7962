"""Rule `overfit`: the loss on held-out data rises from one evaluation to the next while the training loss falls.

Always an info: to train on may be meant, and the checkpoint of the best evaluation is not lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import Window, all_bounded, bounded, column
from gradiometer_server.alerting.rules.scalar_rule import ScalarRule, ScalarState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedScalars

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
        apart: an evaluation counts if this part of all steps so far lies between it and the one before, because where
            there are many, one that is above the one before says nothing.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    rises: int = 3
    least_rise: float = 0.01
    least_fall: float = 0.01
    level_values: int = 32
    apart: float = 1 / 200
    quiet_steps: int = 1000


class _State(ScalarState, kw_only=True):
    train_step: int = -1
    eval_step: int = -1
    values: list[float] = msgspec.field(default_factory=list)
    last: float = math.inf
    train: float = 0.0
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
        train = bounded(next((item.values[name] for name in _TRAIN if name in item.values), math.nan))
        if train is not None and item.step > state.train_step:
            state.train_step = item.step
            self._level.push(train)
        metric = next((name for name in _EVAL if name in item.values), None)
        value = bounded(item.values[metric]) if metric is not None else None
        if metric is None or value is None or item.step <= state.eval_step:
            return []
        if not len(self._level) or not self._is_apart(state, item.step):
            return []
        if not self._evaluated(state, item.step, value, self._level.median()):
            return []
        return [self._breach(item, metric)]

    def take_block(self, block: FoldedBlock) -> bool:
        """See `base.TakesBlocks`."""
        state, defaults = msgspec.structs.replace(self._state), self._defaults
        first = int(block.steps_S[0])
        train = next((name for name in _TRAIN if name in block.names), None)
        metric = next((name for name in _EVAL if name in block.names), None)
        if train is None or first <= state.train_step or first <= state.eval_step:
            return False
        train_S = column(block, train)
        evals_S = train_S if metric is None else column(block, metric)
        if not (all_bounded(train_S) and all_bounded(evals_S)):
            return False
        known = len(self._level)
        values = [*self._level.values, *train_S.tolist()]
        row = 0
        while metric is not None and row < len(evals_S):
            step, end = int(block.steps_S[row]), known + row + 1
            if not self._is_apart(state, step):
                row += 1
                continue
            level = median(values[max(0, end - defaults.level_values) : end])
            if self._evaluated(state, step, float(evals_S[row]), level):
                return False
            row = max(row + 1, int(np.searchsorted(block.steps_S, step / (1 - defaults.apart))) - 1)
        state.train_step = int(block.steps_S[-1])
        self._state, self._level = state, Window(defaults.level_values, values)
        return True

    def _is_apart(self, state: _State, step: int) -> bool:
        return step - state.eval_step >= self._defaults.apart * step

    def _evaluated(self, state: _State, step: int, value: float, train: float) -> bool:
        """Take in an evaluation; whether it is a breach."""
        defaults = self._defaults
        state.eval_step = step
        state.rises = state.rises + 1 if value > state.last else 0
        state.last, state.train = value, train
        if value < state.best:
            state.best, state.best_step, state.train_at_best = value, step, train
        if state.rises < defaults.rises or state.train_at_best is None:
            return False
        rise, fall = value - state.best, state.train_at_best - train
        return rise >= defaults.least_rise * abs(state.best) and fall >= defaults.least_fall * abs(
            state.train_at_best
        )

    def _breach(self, item: FoldedScalars, metric: str) -> Breach:
        state = self._state
        return Breach(
            rule=self.name,
            severity=Severity.INFO,
            step=item.step,
            time_s=item.time_s,
            metric=metric,
            value=state.last,
            baseline=state.best,
            facts=(
                f"{metric} is {number_text(state.last)} and was {number_text(state.best)} at step {state.best_step}",
                f"the training loss went from {number_text(state.train_at_best)} to {number_text(state.train)} since",
            ),
        )
