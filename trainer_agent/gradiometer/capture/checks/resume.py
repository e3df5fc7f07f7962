"""Check `optimizer_state_reset`: the run goes on from a checkpoint, but its optimizer starts anew."""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from gradiometer import wire
from gradiometer.capture import layout, scalars
from gradiometer.capture.checks.finding import CheckReport, Finding, Tally
from gradiometer.capture.observer import StepScalars, Watched

CHECK: Final = "optimizer_state_reset"
_TRIES: Final = 20
"""Steps after which an optimizer without any state is taken for one that keeps none."""


class OptimizerReset:
    """Looks at the optimizer's state just before and after the first step of a continued run."""

    part = "check optimizer_state_reset"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._is_done = watched.start_step <= 0
        self._was_empty: bool | None = None
        self._count: float | torch.Tensor | None = None
        self._num_tries = 0

    def before_read(self) -> None:
        """See `StepObserver`."""
        if not self._is_done and self._was_empty is None:
            states = list(self._watched.optimizer.state.values())
            self._was_empty = not any(states)
            self._count = _count_of(states)

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        if self._is_done or self._was_empty is None:
            return ()
        # An optimizer that keeps no state (plain SGD) has none afterwards either.
        has_state = any(self._watched.optimizer.state.values())
        if self._was_empty and not has_state:
            # A first step that the scaler skipped makes no state either.
            self._num_tries += 1
            self._is_done = self._num_tries >= _TRIES
            return ()
        self._is_done = True
        count = 0.0 if self._was_empty else self._count
        if count is not None:
            counted, start = scalars.collect([(wire.Column("count"), count)]), self._watched.start_step
            self._watched.emit(
                CheckReport(
                    step=step,
                    time=time.time(),
                    watch=self._watched.name,
                    tally=Tally(),
                    judge=lambda: _judge(counted.row()[0], start),
                )
            )
        return ()

    def close(self) -> None:
        """See `StepObserver`."""


def _count_of(states: list[Any]) -> float | torch.Tensor | None:
    """The optimizer's own count of its steps; None if it keeps none."""
    for state in states:
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, torch.Tensor):
            # A copy, because the step changes it in place.
            return layout.local_of(count).detach().clone().reshape(())
        if isinstance(count, (int, float)):
            return float(count)
    return None


def _judge(count: float, start_step: int) -> Finding | None:
    if count != 0.0:
        return None
    return Finding(
        check=CHECK,
        title=f"The run goes on from step {start_step}, but the optimizer starts from nothing",
        text=f"start_step says that {start_step} steps were completed, yet at the first step of this process the optimizer "
        "had no state or counted 0 steps: its moments and bias correction begin anew, and the first updates are larger "
        "than before the restart.",
        advice="Load the optimizer's state too: optimizer.load_state_dict(checkpoint['optimizer']), after the optimizer "
        "is made. The same goes for the scheduler and the GradScaler.",
        metric="train/loss",
        facts={"start_step": start_step, "optimizer_steps": count},
    )
