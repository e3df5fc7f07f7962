"""What else wants to know when a watch reads gradients and ends steps: ledgers, checks, recorders.

An observer is one file of `capture/` that knows one thing; `observers_of` lists all that apply to a watch. The watch
calls every method through the guard under the observer's own part, so that a broken observer is lost alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from gradiometer import wire
from gradiometer.guard import Guard
from gradiometer.reports import Report

StepScalars = Sequence[tuple[wire.Column, float | torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What is watched, as an observer sees it.

    Attributes:
        model, optimizer, scaler: the optimizer is unwrapped; scaler None: there is none, or it is disabled.
        device: of the first parameter.
        is_clock: whether this watch's steps are the run's steps.
        name: tells watches apart; empty for the first.
        start_step: optimizer steps that a loaded checkpoint had completed; 0 for a watch added after the first step.
        checks: whether the user wants the exact checks.
        num_gradients: how many were read in the step under way.
        emit: takes a report; must not wait.
        unavailable: told a metric and why it cannot be collected; may be told again.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    device: torch.device
    is_clock: bool
    name: str
    start_step: int
    checks: bool
    num_gradients: Callable[[], int]
    emit: Callable[[Report], None]
    unavailable: Callable[[str, str], None]
    guard: Guard


class StepObserver(Protocol):
    """Told about the steps of one watch, on the training thread. Must not wait for a device or do I/O."""

    part: str

    def before_read(self) -> None:
        """The gradients of the step under way are complete, and about to be read; before any clipping."""
        ...

    def end_step(self, step: int) -> StepScalars:
        """`step` is complete (or was skipped): its numbers."""
        ...

    def close(self) -> None:
        """Leave everything as it was before."""
        ...


@runtime_checkable
class LossObserver(Protocol):
    """An observer that also wants the losses that are logged before their backward pass."""

    part: str

    def loss_logged(self, name: str, loss: torch.Tensor) -> None:
        """The user logs `loss`, which has a graph. Must keep no reference to it, and change nothing."""
        ...


@runtime_checkable
class SteppingObserver(Protocol):
    """An observer that also wants to know when the optimizers themselves work."""

    part: str

    def stepping(self) -> None:
        """An optimizer begins its step; the agent has done what it does before."""
        ...

    def stepped(self, at_s: float) -> None:
        """At `at_s` of `time.perf_counter` an optimizer ended its step, or was skipped. Perhaps the last one."""
        ...


def observers_of(watched: Watched) -> list[StepObserver]:
    """All observers that apply."""
    # Here, because these are observers themselves.
    from gradiometer.capture import checks
    from gradiometer.capture.memory_ledger import MemoryLedger
    from gradiometer.capture.microbatches import MicroBatches
    from gradiometer.capture.timing import TimeLedger

    found: list[StepObserver] = []
    if watched.checks:
        found += checks.all_of(watched)
    found.append(MemoryLedger(watched))
    if watched.is_clock:
        found += [MicroBatches(watched), TimeLedger(watched)]
    return found
