"""Check `learning_rate_zero`: the optimizer goes on stepping with a learning rate of exactly 0."""

from __future__ import annotations

import time
from typing import Final

from gradiometer.capture.checks.finding import CheckReport, Finding, Tally
from gradiometer.capture.observer import StepScalars, Watched

CHECK: Final = "learning_rate_zero"
_AFTER_TRAINING: Final = 10
"""Steps in a row at 0 after it was not. A schedule that reaches 0 in its last step or two is meant to."""
_FROM_START: Final = 50
"""Steps in a row at 0 from the start. A warm-up begins with one such step, or a few."""


class ZeroLearningRate:
    """Counts steps at which every group's learning rate is 0. A rate kept in a tensor is not looked at."""

    part = "check learning_rate_zero"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._rates: tuple[object, ...] = ()
        self._num_zero = 0
        self._was_positive = self._is_told = False

    def before_read(self) -> None:
        """See `StepObserver`."""
        # As this step uses them: a scheduler may have moved them on by the time the step has ended.
        self._rates = tuple(group.get("lr") for group in self._watched.optimizer.param_groups)

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        rates, self._rates = self._rates, ()
        if self._is_told or not rates or not all(isinstance(rate, (int, float)) for rate in rates):
            return ()
        if any(rate != 0.0 for rate in rates):
            self._num_zero, self._was_positive = 0, True
            return ()
        self._num_zero += 1
        if self._num_zero >= (_AFTER_TRAINING if self._was_positive else _FROM_START):
            self._is_told = True
            found = _finding(step - self._num_zero + 1, self._num_zero)
            name = self._watched.name
            self._watched.emit(
                CheckReport(step=step, time=time.time(), watch=name, tally=Tally(), judge=lambda: found)
            )
        return ()

    def close(self) -> None:
        """See `StepObserver`."""


def _finding(first_step: int, num_steps: int) -> Finding:
    return Finding(
        check=CHECK,
        title=f"The learning rate is 0 since step {first_step}, and training goes on",
        text=f"{num_steps} steps in a row had a learning rate of exactly 0 in every parameter group: their gradients are "
        "computed and thrown away.",
        advice="Compare the schedule's number of steps with the number that the loop makes: a schedule that ends early, "
        "is stepped once per process or per micro-batch, or is off by one reaches 0 too soon.",
        metric="train/lr",
        facts={"first_step": first_step, "steps": num_steps},
    )
