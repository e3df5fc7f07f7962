"""Check `no_step_seen`: losses are logged, but the watched optimizer never steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from gradiometer.capture.checks.finding import CheckReport, Finding, Tally
from gradiometer.reports import Report

CHECK: Final = "no_step_seen"
_LOGS: Final = 1000
"""Losses logged without a step. More micro-batches than that in one step are rare."""
_LOGS_AT_END: Final = 10
"""The same when the run ends well."""


class NoStep:
    """Counts logged losses until the first step. `emit` takes a report; must not wait."""

    def __init__(self, emit: Callable[[Report], None]) -> None:
        self._emit = emit
        self._num_logs = 0
        self._is_told = False

    # Hot path: training thread, once per logged loss until the first step.
    def logged(self, step: int) -> None:
        """A training loss was logged and no step has been seen yet."""
        self._num_logs += 1
        if self._num_logs >= _LOGS:
            self._tell(step)

    def end(self, step: int) -> None:
        """The run ends and no step was seen."""
        if self._num_logs >= _LOGS_AT_END:
            self._tell(step)

    def _tell(self, step: int) -> None:
        if self._is_told:
            return
        self._is_told = True
        found = _finding(self._num_logs)
        self._emit(CheckReport(step=step, time=time.time(), watch="", tally=Tally(), judge=lambda: found))


def _finding(num_logs: int) -> Finding:
    return Finding(
        check=CHECK,
        title="watch() has seen no optimizer step",
        text=f"{num_logs} training losses were logged since watch() was called, but step() of the watched optimizer was not "
        "called once, so there are no gradients, no learning rate and no step times.",
        advice="Is the optimizer given to watch() the one that steps? It may have been made anew afterwards, or wrapped "
        "by something that copies it. Call watch() after the last change.",
        metric="train/loss",
        facts={"losses_logged": num_logs},
    )
