"""What rules on a series of values share: a window with robust figures, and the pace at which steps are reported."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradiometer_server.alerting.rules.base import is_loss
from gradiometer_server.domain.folded import FoldedBlock

MAD_TO_SD: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
LEARNING_RATE: Final = "train/lr"
LARGEST: Final = 1e150
"""Values beyond it, of either sign, are judged as if they were this: differences and sums of such must stay finite."""
MAX_JUDGED: Final = 4
"""Most losses of one run that the rules on a loss follow."""
_NO_LOSS: Final = ("scale", "weight", "coef", "ratio", "num_", "count", "finite", "begin")
"""Words in the name of a metric that is about a loss and is none."""
_MAIN: Final = ("train/loss", "loss")


class Window:
    """The last `size` values and their median and deviation. Values must be finite."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._size = size
        self.values: list[float] = list(values)[-size:]
        """Oldest first; what a rule persists."""
        self._sorted = sorted(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float) -> None:
        """Take in a value; the oldest leaves a full window."""
        # Hot path: two bisections and two moves inside a short list.
        self.values.append(value)
        insort(self._sorted, value)
        if len(self.values) > self._size:
            del self._sorted[bisect_left(self._sorted, self.values.pop(0))]

    def median(self) -> float:
        """Middle of the values; there must be one."""
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return 0.5 * (self._sorted[middle - 1] + self._sorted[middle])

    def deviation(self) -> float:
        """Median absolute deviation times 1.4826: the standard deviation, unmoved by a few outliers."""
        return deviation_of(self._sorted)

    def clear(self) -> None:
        """Forget everything."""
        self.values.clear()
        self._sorted.clear()


def bounded(value: float) -> float | None:
    """`value` as the rules judge it; None if it is not finite: rule `non_finite` has that, and a baseline must not."""
    if -LARGEST <= value <= LARGEST:
        return value
    return math.copysign(LARGEST, value) if math.isfinite(value) else None


def all_bounded(values_S: NDArray[np.float64]) -> bool:
    """Whether `bounded` would change none of these."""
    # A NaN compares false.
    return bool((np.abs(values_S) <= LARGEST).all())


def deviation_of(values: Sequence[float]) -> float:
    """Median absolute deviation of `values` times 1.4826; there must be one."""
    middle = median(values)
    return MAD_TO_SD * median([abs(value - middle) for value in values])


class Pace(msgspec.Struct, kw_only=True):
    """How far reported steps are apart. What was usual at one interval says little of values at another."""

    first_step: int | None = None
    last_step: int = -1
    gap: int = 0
    odd_gap: int = 0
    """The last gap, if it was unlike the usual one."""

    def take(self, step: int, *, factor: int = 4) -> bool:
        """Move to `step`; whether the interval has changed for good: two gaps in a row like each other, unlike before."""
        gap, self.last_step = step - self.last_step, step
        if self.first_step is None:
            self.first_step = step
            return False
        if not self.gap or _alike(gap, self.gap, factor):
            self.gap, self.odd_gap = gap, 0
            return False
        if self.odd_gap and _alike(gap, self.odd_gap, factor):
            self.gap, self.odd_gap = gap, 0
            return True
        self.odd_gap = gap
        return False

    def is_steady(self, steps_S: NDArray[np.int64]) -> bool:
        """Whether all of these steps go on at the usual interval, so that `take` would only move."""
        if (
            self.first_step is None
            or not self.gap
            or self.odd_gap
            or int(steps_S[0]) - self.last_step != self.gap
        ):
            return False
        return bool((np.diff(steps_S) == self.gap).all())

    @property
    def began_midway(self) -> bool:
        """Whether the first step is far from a training's start, so that the model was in its stride already."""
        return self.first_step is not None and self.first_step >= max(100, 20 * max(self.gap, 1))


def _alike(gap: int, other: int, factor: int) -> bool:
    return gap < other * factor and other < gap * factor


def column(block: FoldedBlock, name: str) -> NDArray[np.float64]:
    """Values (S,) of one metric of a block."""
    return block.values_SC[:, block.names.index(name)]


def judged_losses(values: Mapping[str, float], followed: Mapping[str, object]) -> list[str]:
    """Names of the losses in `values` that a rule follows: those it does already, and new ones while there is room."""
    names = []
    room = MAX_JUDGED - len(followed)
    for name in values:
        if name in followed:
            names.append(name)
        elif room > 0 and _is_judged(name):
            names.append(name)
            room -= 1
    return names


@lru_cache(maxsize=4096)
def _is_judged(name: str) -> bool:
    return is_loss(name) and not any(word in name.lower() for word in _NO_LOSS)


def has_judged_loss(block: FoldedBlock) -> bool:
    """Whether `block` has a loss that rules follow."""
    return bool(judged_losses(dict.fromkeys(block.names, 0.0), {}))


def key_of(metric: str) -> str:
    """The key of an episode about a loss: the usual one has none."""
    return "" if metric in _MAIN else metric


class Schedule(msgspec.Struct, kw_only=True):
    """Follows the learning rate to tell when it is in warm-up or starts again."""

    lr: float | None = None
    lr_step: int = -1
    rising: bool = False

    def take(self, step: int, values: Mapping[str, float]) -> bool:
        """Read the learning rate of `step`; whether it started again: more than doubled, after it had not risen."""
        lr = bounded(values.get(LEARNING_RATE, math.nan))
        if lr is None or step <= self.lr_step:
            return False
        before, rose = self.lr, self.rising
        self.rising = before is not None and lr > before
        self.lr, self.lr_step = lr, step
        return before is not None and before > 0 and lr > 2 * before and not rose

    def is_usual(self, block: FoldedBlock) -> bool:
        """Whether the learning rate starts nowhere again in `block`, so that `take_block` may be used."""
        if LEARNING_RATE not in block.names:
            return True
        lr_S = column(block, LEARNING_RATE)
        if self.lr is None or int(block.steps_S[0]) <= self.lr_step or not all_bounded(lr_S):
            return False
        before_S = np.concatenate(([self.lr], lr_S[:-1]))
        rises_S = lr_S > before_S
        rose_S = np.concatenate(([self.rising], rises_S[:-1]))
        return not bool(((before_S > 0) & (lr_S > 2 * before_S) & ~rose_S).any())

    def take_block(self, block: FoldedBlock) -> None:
        """What `take` leaves after every step of a usual block."""
        if LEARNING_RATE in block.names:
            lr_S = column(block, LEARNING_RATE)
            before = float(lr_S[-2]) if len(lr_S) > 1 else self.lr
            self.rising = before is not None and bool(lr_S[-1] > before)
            self.lr, self.lr_step = float(lr_S[-1]), int(block.steps_S[-1])
