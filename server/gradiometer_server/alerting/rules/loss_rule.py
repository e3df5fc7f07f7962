"""What the rules share that follow every loss of a run against its own past, until the learning rate's schedule begins anew."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradiometer_server.alerting.rules.baseline import LEARNING_RATE, Schedule, column, judged_losses
from gradiometer_server.alerting.rules.scalar_rule import ScalarRule, ScalarState
from gradiometer_server.domain.alerts import Breach
from gradiometer_server.domain.folded import FoldedBlock, FoldedScalars


class LossState(ScalarState, kw_only=True):
    """State of such a rule: by loss, what is known of it."""

    schedule: Schedule = msgspec.field(default_factory=Schedule)
    series: dict[str, Any] = msgspec.field(default_factory=dict)


S = TypeVar("S", bound=LossState)


class LossRule(ScalarRule[S]):
    """Give `take` and `forget`; and `after` and `known_again`, where usual blocks are taken whole."""

    reads = frozenset({LEARNING_RATE})
    reads_losses = True

    def take(self, item: FoldedScalars, name: str) -> Breach | None:
        """A breach that the loss `name` of `item` completes."""
        raise NotImplementedError

    def forget(self, name: str) -> None:
        """What is known of a loss holds no more."""
        raise NotImplementedError

    def after(self, name: str, steps_S: NDArray[np.int64], values_S: NDArray[np.float64]) -> Any:
        """The series after usual values, none of which is a breach; None if one may be, or too little is known."""
        return None

    def known_again(self, name: str) -> None:
        """The series of `name` was replaced: what was made of it is to be made anew."""

    def judge(self, item: FoldedScalars) -> list[Breach]:
        """A breach for each loss that completes one."""
        state = self._state
        if state.schedule.take(item.step, item.values):
            for name in state.series:
                self.forget(name)
        breaches = [self.take(item, name) for name in judged_losses(item.values, state.series)]
        return [breach for breach in breaches if breach is not None]

    def take_block(self, block: FoldedBlock) -> bool:
        """See `base.TakesBlocks`."""
        state = self._state
        names = judged_losses(dict.fromkeys(block.names, 0.0), state.series)
        if not state.series.keys() >= set(names) or not state.schedule.is_usual(block):
            return False
        after = {name: self.after(name, block.steps_S, column(block, name)) for name in names}
        if None in after.values():
            return False
        for name, series in after.items():
            state.series[name] = series
            self.known_again(name)
        state.schedule.take_block(block)
        return True
