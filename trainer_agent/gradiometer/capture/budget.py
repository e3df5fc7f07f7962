"""Lets the reading of gradients rest in some steps, where it would take too much of every step.

On a CPU, reading each gradient once may take several percent of a step of large layers and a small batch. It then
rests in all but the first of every 2, 4 or 8 steps. A step in which it rests is not left alone: the smallest
gradients are looked at, and if one is not finite, everything is read in that step after all. What goes wrong in a
forward or a backward pass reaches the gradients of the layers that are nearest to the input.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import distributed

MAX_FRACTION: Final = 0.015
"""Of a step that reading may take. With the forward probe and the rest of the agent that is less than 3 %."""
MIN_READING_S: Final = 0.001
"""A reading that takes less never rests: nobody minds it, and small models are there to be looked at."""
MAX_EVERY: Final = 8
WINDOW: Final = 16
"""Readings by which it is decided how often to read; by the fastest of them and the median step, because other work
on the machine makes some slow."""
_HYSTERESIS: Final = 0.7
MAX_SENTINELS: Final = 64
MAX_SENTINEL_ELEMENTS: Final = 16_384


class Budget:
    """Decides in which steps the gradients of one watch are read.

    Args:
        coming: number of the step under way.
        changed: told a sentence for people when it is decided to read less or more often.
        clock: seconds.
    """

    def __init__(
        self,
        coming: Callable[[], int],
        changed: Callable[[int, str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._coming, self._changed, self._clock = coming, changed, clock
        self.every = 1
        self._step = self._stretch = -1
        self._is_due = True
        self._begun_s = self._spent_s = 0.0
        self._readings: list[float] = []
        self._steps: list[float] = []

    # Hot path: training thread, once per reading.
    def is_due(self) -> bool:
        """Whether the step under way is to be read; asked again for one step, the answer is the same."""
        step = self._coming()
        if step != self._step:
            self._end(step)
            stretch = (step - 1) // self.every
            self._is_due, self._stretch = stretch != self._stretch, stretch
        return self._is_due

    def book(self, started_s: float) -> None:
        """A reading that began at `started_s` of the clock has ended."""
        self._spent_s += self._clock() - started_s

    def _end(self, step: int) -> None:
        now_s = self._clock()
        if self._step >= 0:
            self._steps.append((now_s - self._begun_s) / max(1, step - self._step))
            if self._spent_s > 0:
                self._readings.append(self._spent_s)
        self._step, self._begun_s, self._spent_s = step, now_s, 0.0
        if len(self._readings) >= WINDOW:
            self._decide()

    def _decide(self) -> None:
        reading_s, step_s = min(self._readings), statistics.median(self._steps)
        self._readings, self._steps = [], []
        every = wanted_every(reading_s, step_s)
        if every < self.every and every < wanted_every(reading_s / _HYSTERESIS, step_s):
            # Near the border: stay rather than change to and fro.
            every = min(self.every, 2 * every)
        if every == self.every:
            return
        self.every, self._stretch = every, -1
        self._changed(every, f"reading the gradients takes {reading_s / step_s:.1%} of a step")


def wanted_every(reading_s: float, step_s: float) -> int:
    """The smallest of 1, 2, 4 and 8 steps of which one may be read within the budget; 8 if none is enough."""
    if reading_s < MIN_READING_S:
        return 1
    every = 1
    while every < MAX_EVERY and reading_s > MAX_FRACTION * step_s * every:
        every *= 2
    return every


def sentinels(parameters: Sequence[torch.Tensor], rows: Sequence[int]) -> list[int]:
    """Those of `rows` whose gradients are looked at in every step: the smallest, of equal ones the first."""
    found: list[int] = []
    left = MAX_SENTINEL_ELEMENTS
    for row in sorted(rows, key=lambda row: parameters[row].numel())[:MAX_SENTINELS]:
        left -= parameters[row].numel()
        if found and left < 0:
            break
        found.append(row)
    return sorted(found)


def is_alone() -> bool:
    """Whether no other rank takes part, which would have to rest in the same steps."""
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size()) == 1
    return os.environ.get("WORLD_SIZE", "1") in ("", "1")
