"""What rules on a series of values share: a window with robust figures, and the pace at which steps are reported."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gradiometer_server.alerting.rules.base import is_loss
from gradiometer_server.domain.folded import FoldedBlock

MAD_TO_SD: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
LEARNING_RATE: Final = "train/lr"
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
        middle = self.median()
        apart = sorted(abs(value - middle) for value in self._sorted)
        half = len(apart) // 2
        return MAD_TO_SD * (apart[half] if len(apart) % 2 else 0.5 * (apart[half - 1] + apart[half]))

    def clear(self) -> None:
        """Forget everything."""
        self.values.clear()
        self._sorted.clear()


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

    @property
    def began_midway(self) -> bool:
        """Whether the first step is far from a training's start, so that the model was in its stride already."""
        return self.first_step is not None and self.first_step >= max(100, 20 * max(self.gap, 1))


def _alike(gap: int, other: int, factor: int) -> bool:
    return gap < other * factor and other < gap * factor


def judged_losses(values: Mapping[str, float], followed: Mapping[str, object]) -> list[str]:
    """Names of the losses in `values` that a rule follows: those it does already, and new ones while there is room."""
    names = []
    room = MAX_JUDGED - len(followed)
    for name in values:
        if name in followed:
            names.append(name)
        elif room > 0 and is_loss(name) and not any(word in name.lower() for word in _NO_LOSS):
            names.append(name)
            room -= 1
    return names


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
        lr = values.get(LEARNING_RATE)
        if lr is None or step <= self.lr_step or not math.isfinite(lr):
            return False
        before, rose = self.lr, self.rising
        self.rising = before is not None and lr > before
        self.lr, self.lr_step = lr, step
        return before is not None and before > 0 and lr > 2 * before and not rose
