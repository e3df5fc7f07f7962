"""Check `scaler_not_given`: a GradScaler calls `optimizer.step()`, but `watch` was not told about it.

Proved by the call stack of the step itself: the frame of `GradScaler.step` holds the scaler.
"""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any, Final

from torch.amp.grad_scaler import GradScaler

from gradiometer.capture.checks.finding import CheckReport, Finding, Tally
from gradiometer.capture.observer import StepScalars, Watched

CHECK: Final = "scaler_not_given"
_STEPS: Final = 3
"""The first steps are looked at; a loop does not change how it steps later."""
_MAX_FRAMES: Final = 48


class ScalerNotGiven:
    """Walks up the stack from the first steps."""

    part = "check scaler_not_given"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._num_left = 0 if watched.scaler is not None else _STEPS

    def before_read(self) -> None:
        """See `StepObserver`."""

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        if self._num_left <= 0:
            return ()
        self._num_left -= 1
        scaler = _scaler_above(sys._getframe())
        if scaler is not None and scaler.is_enabled():
            self._num_left = 0
            name = self._watched.name
            self._watched.emit(
                CheckReport(step=step, time=time.time(), watch=name, tally=Tally(), judge=lambda: _FINDING)
            )
        return ()

    def close(self) -> None:
        """See `StepObserver`."""


def _scaler_above(frame: FrameType | None) -> Any:
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_code is GradScaler.step.__code__:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


_FINDING: Final = Finding(
    check=CHECK,
    title="A GradScaler is in use, but watch() was not given it",
    text="scaler.step() calls this optimizer. Without the scaler the steps that it skips are not seen or counted, the "
    "loss scale is not shown, and gradients that are clipped before unscaling would be shown multiplied by it.",
    advice="Pass it on: run.watch(model, optimizer, scaler).",
    metric="grad/norm",
)
