"""When each step happened: the earliest time that any rank gave for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

MAX_STEPS: Final = 4096
"""Steps whose time is remembered; a report of an older one takes no part in the `_time` series."""


class StepTimes:
    """Earliest time by step. Independent of the order in which ranks arrive."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._forgotten_below = 0
        self._changed: dict[int, float] = {}
        self._highest = -1

    def report_all(self, steps: Sequence[int], times: Sequence[float]) -> None:
        """`report` of rising steps. # Hot path: new steps cost no loop."""
        if steps[0] <= self._highest:
            for step, time_s in zip(steps, times, strict=True):
                self.report(step, time_s)
            return
        fresh = dict(zip(steps, times, strict=True))
        self._times.update(fresh)
        self._changed.update(fresh)
        self._highest = steps[-1]
        if len(self._times) > MAX_STEPS:
            self._forget()

    def report(self, step: int, time_s: float) -> None:
        """A rank says that `step` was at `time_s` (Unix seconds)."""
        known = self._times.get(step)
        if (known is None and step >= self._forgotten_below) or (known is not None and time_s < known):
            self._times[step] = self._changed[step] = time_s
            self._highest = max(self._highest, step)
            if len(self._times) > MAX_STEPS:
                self._forget()

    def of(self, step: int) -> float:
        """Time of a step; 0.0 if it is forgotten."""
        return self._times.get(step, 0.0)

    def take_changed(self) -> dict[int, float]:
        """Times that are new or earlier than before, since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def restore(self, times: Mapping[int, float]) -> None:
        """Take over the times that are stored of the last steps; nothing of it counts as changed."""
        self._times.update(times)
        self._highest = max(self._times, default=-1)
        if len(times) >= MAX_STEPS:
            self._forgotten_below = max(self._forgotten_below, min(times))

    def _forget(self) -> None:
        steps = sorted(self._times)
        num_gone = len(steps) - MAX_STEPS + MAX_STEPS // 4
        for step in steps[:num_gone]:
            del self._times[step]
        self._forgotten_below = max(self._forgotten_below, steps[num_gone])
