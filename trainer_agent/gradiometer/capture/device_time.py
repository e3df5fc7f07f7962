"""Phases of a step on a CUDA device, by events that the training thread records and the agent's thread reads.

The gap that waiting for data leaves on the device is what the device was idle for: a wait that the device did not notice,
because it still had work, is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from gradiometer import wire
from gradiometer.capture.statistics import Floats
from gradiometer.phases import NAMES
from gradiometer.reports import ScalarReport, Scalars

MAX_MARKS: Final = 4096
"""Events of one step; a step with more is not timed."""
Marks = Sequence[tuple[int | None, Any]]
"""What the device was in from an event on (None: in no phase); the last event ends the step."""


def _cuda_event(device: torch.device) -> Any:
    # blocking: a thread that waits must sleep, not spin on a core that the training needs.
    event: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class DevicePhases:
    """Records events.

    Args:
        record: makes an event that was recorded on the current stream; for tests.
    """

    def __init__(self, device: torch.device, record: Callable[[torch.device], Any] = _cuda_event) -> None:
        self._device, self._record = device, record
        self._marks: list[tuple[int | None, Any]] = []
        self._end: int | None = None
        self._lost = False

    # Hot path: training thread, at the beginning and end of every phase. One asynchronous launch; must not synchronise.
    def mark(self, phase: int | None) -> None:
        """What is launched from now on belongs to `phase`."""
        if len(self._marks) >= MAX_MARKS or (
            self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):
            self._lost = True
            return
        self._marks.append((phase, self._record(self._device)))

    def step(self, phase: int | None) -> None:
        """An optimizer stepped, perhaps the last of the step."""
        if len(self._marks) >= MAX_MARKS:
            # The next step must begin where this one ends.
            del self._marks[-1]
        self.mark(phase)
        self._end = len(self._marks)

    def end_step(self) -> Marks | None:
        """The step ended when an optimizer last stepped: its marks, from the end of the step before. None: unknown."""
        end, self._end = self._end, None
        lost, self._lost = self._lost, False
        if end is None:
            return None
        marks = self._marks[:end]
        # The end of this step begins the next.
        self._marks = self._marks[end - 1 :]
        return None if lost or len(marks) < 2 else marks


class PhasesReadback:
    """Seconds of each phase that was seen, of the rest, and of the whole step; see `readback.Readback`."""

    __slots__ = ("_marks", "_seen")

    def __init__(self, marks: Marks, seen: Sequence[int]) -> None:
        self._marks, self._seen = marks, seen

    def values(self) -> Floats:
        """Waits for the device: agent thread only."""
        events = [event for _, event in self._marks]
        # All of them: the training may have used several streams.
        for event in events:
            event.synchronize()
        totals = [0.0] * len(NAMES)
        for (phase, event), following in zip(self._marks, events[1:], strict=False):
            if phase is not None:
                totals[phase] += event.elapsed_time(following) / 1000.0
        step_s = events[0].elapsed_time(events[-1]) / 1000.0
        spent_s = [totals[phase] for phase in self._seen]
        return np.array([*spent_s, step_s - sum(spent_s), step_s])


def report(step: int, at: float, marks: Marks, seen: Sequence[int]) -> ScalarReport:
    """The report of one step, to be completed on the agent's thread."""
    names = [*(NAMES[phase] for phase in seen), "other", "device_step"]
    columns = tuple(wire.Column(f"time/{name}_s") for name in names)
    pending = ((tuple(range(len(columns))), PhasesReadback(marks, tuple(seen))),)
    scalars = Scalars(columns=columns, numbers=(0.0,) * len(columns), pending=pending)
    return ScalarReport(step=step, time=at, scalars=scalars)
