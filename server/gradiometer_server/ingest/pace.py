"""How fast a run's steps go by, so that a command can name a step that all ranks still have before them.

A command reaches each rank at its own time, and what is taken at different steps cannot be added up. Thread-safe if the
caller's lock is held.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from typing import Final

from gradiometer_server.domain.live import PointsUpdate

LEAD_S: Final = 3.0
"""From the server to every agent's thread, which looks at most once a second, with as much again to spare."""
MIN_LEAD_STEPS: Final = 2
"""The step under way may have been read already."""
_STEP_S: Final = "time/step_s"
_NUM_STEPS: Final = 32
_MAX_RUNS: Final = 1000


class Pace:
    """Last step and step times of runs, by public id."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, tuple[int, deque[float]]] = OrderedDict()

    # Hot path: the fold, for every update.
    def observe(self, update: PointsUpdate) -> None:
        """Take in new points of a run."""
        points = update.series.get(_STEP_S)
        if not points:
            return
        _, times = self._runs.get(update.run_id, (0, deque(maxlen=_NUM_STEPS)))
        times.extend(value for _, value in points[-_NUM_STEPS:] if math.isfinite(value) and value > 0.0)
        self._runs[update.run_id] = (points[-1][0], times)
        self._runs.move_to_end(update.run_id)
        if len(self._runs) > _MAX_RUNS:
            self._runs.popitem(last=False)

    def step_ahead(self, run_id: str) -> int | None:
        """A step that no rank will have reached when it hears of it; None if nothing is known of the run."""
        step, times = self._runs.get(run_id, (0, None))
        if not times:
            return None
        # The median, because an evaluation between two steps makes one of them very long.
        return step + max(MIN_LEAD_STEPS, math.ceil(LEAD_S / statistics.median(times)))
