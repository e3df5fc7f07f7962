"""What one browser still has to be told: bounded, coalesced, in order. No I/O and no clock.

Points of a run merge into one pending message; alerts merge by episode; what the run itself is and which metrics it
has are only "ask again" marks. A browser that does not keep up loses its queue and gets one `resync` per run, so its
cost to the server has a ceiling that does not depend on how slow it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gradiometer_server.domain.jsonable import float_to_json
from gradiometer_server.domain.live import PointsUpdate

MAX_PENDING_POINTS: Final = 20_000
"""Points a browser may lag behind: about 10 s of 100 metrics at 20 steps per second."""
MAX_PENDING_MESSAGES: Final = 500
POINTS_INTERVAL_S: Final = 0.05

Message = Mapping[str, Any]
Key = tuple[str, str | None] | tuple[str, str, str]
"""Kind of message, run id (None: about no run), and whatever else makes two messages the same."""


@dataclass(slots=True)
class _Points:
    """Pending points of one run: metric -> (steps, values)."""

    series: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    layers_step: int | None = None
    count: int = 0

    def add(self, update: PointsUpdate) -> int:
        before = self.count
        for metric, points in update.series.items():
            steps, values = self.series.setdefault(metric, ([], []))
            steps.extend(step for step, _ in points)
            values.extend(value for _, value in points)
            self.count += len(points)
        if update.layers_step is not None:
            self.layers_step = update.layers_step
        return self.count - before

    def message(self, run_id: str) -> Message:
        series = [
            {"metric": metric, "steps": steps, "values": [float_to_json(value) for value in values]}
            for metric, (steps, values) in self.series.items()
        ]
        return {"type": "points", "run": run_id, "series": series, "layers_step": self.layers_step}


class BrowserQueue:
    """Pending messages of one browser; used from the event loop only.

    Attributes:
        num_resyncs: how often it had to be cleared.
    """

    def __init__(self) -> None:
        self._points: dict[str, _Points] = {}
        self._num_points = 0
        self._not_before_s: dict[str, float] = {}
        self._others: dict[Key, Message] = {}
        self.num_resyncs = 0

    def add_points(self, update: PointsUpdate) -> None:
        """Merge points into what is pending for their run."""
        if update.run_id in self._points or update.series or update.layers_step is not None:
            pending = self._points.setdefault(update.run_id, _Points())
            self._num_points += pending.add(update)
            if self._num_points > MAX_PENDING_POINTS:
                self.overflow()

    def add(self, key: Key, message: Message) -> None:
        """Queue a message; a pending one of the same key is replaced in its place."""
        self._others[key] = message
        if len(self._others) > MAX_PENDING_MESSAGES:
            self.overflow()

    def overflow(self, runs: Sequence[str | None] = (), reason: str = "this browser did not keep up") -> None:
        """Forget everything pending, and say so once for each run that it was about (and for `runs`)."""
        affected: dict[str | None, None] = dict.fromkeys(
            [*runs, *self._points, *(key[1] for key in self._others if key[0] != "problem")]
        )
        self._points.clear()
        self._others.clear()
        self._num_points = 0
        self.num_resyncs += 1
        for run_id in affected:
            message = {"type": "resync", "run": run_id, "reason": reason}
            self._others["resync", run_id] = message

    def forget(self, run_id: str) -> None:
        """Drop what is pending for a run that the browser no longer watches."""
        pending = self._points.pop(run_id, None)
        self._num_points -= pending.count if pending else 0
        self._not_before_s.pop(run_id, None)
        for key in [key for key in self._others if key[1] == run_id]:
            del self._others[key]

    def take(self, now_s: float) -> list[Message]:
        """Everything that may be sent now; points of a run at most every `POINTS_INTERVAL_S`."""
        messages: list[Message] = list(self._others.values())
        self._others.clear()
        due = [run_id for run_id in self._points if self._not_before_s.get(run_id, 0.0) <= now_s]
        for run_id in due:
            points = self._points.pop(run_id)
            self._num_points -= points.count
            self._not_before_s[run_id] = now_s + POINTS_INTERVAL_S
            messages.append(points.message(run_id))
        return messages

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until something may be sent: 0 now, None when nothing is pending."""
        if self._others:
            return 0.0
        if not self._points:
            return None
        return max(0.0, min(self._not_before_s.get(run_id, 0.0) for run_id in self._points) - now_s)
