"""Check `missing_zero_grad`: the gradients of the step before were still there, in every backward pass of a step.

One backward pass that finds an old gradient proves nothing: in a GAN the generator's loss flows through the
discriminator, whose optimizer clears its gradients later. A step is judged by the pass that found least: if even
that one found something, nothing was cleared between the two steps.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Final

import torch

from gradiometer import values, wire
from gradiometer.capture import scalars
from gradiometer.capture.checks.finding import CheckReport, Finding, Tally
from gradiometer.capture.checks.sentinel import Before, Sentinel
from gradiometer.capture.observer import StepScalars, Watched

CHECK: Final = "missing_zero_grad"
_CHANGES: Final = 2
"""In-place changes that one backward pass of FSDP2 makes of a sharded gradient: it adds, and assigns the result."""
_TELL_AFTER: Final = 50
"""Steps without a single look after which it is said that the check is not made."""


class MissingZeroGrad:
    """Looks at what is in `.grad` when a backward pass adds to it."""

    part = "check missing_zero_grad"

    def __init__(self, watched: Watched, sentinel: Sentinel) -> None:
        self._watched, self._sentinel = watched, sentinel
        self._tally = Tally()
        self._num_steps = self._num_judged = 0
        self._begin()
        sentinel.subscribe(self._accumulated)

    def _begin(self) -> None:
        self._is_clean = False
        self._least: torch.Tensor | None = None
        self._num_looks = 0
        # In a step that is told only by hooks on losses: the gradient as the first of them saw it.
        self._first: weakref.ref[Any] | None = None
        self._version = 0

    # Hot path: training thread, once per backward pass. Must read no value.
    def _accumulated(self, before: Before) -> None:
        self._num_looks += 1
        if before is None:
            self._is_clean = True
        elif not self._is_clean:
            self._least = before if self._least is None else torch.minimum(self._least, before)

    def loss_logged(self, name: str, loss: torch.Tensor) -> None:
        """See `LossObserver`."""
        sentinel = self._sentinel
        if sentinel.is_hooked or sentinel.problem is not None or not values.is_train_loss(name):
            return
        guard, part, look = self._watched.guard, self.part, self._look_from_loss

        def started(_gradient: torch.Tensor) -> None:
            guard.entered(part, look)

        loss.register_hook(started)  # type: ignore[no-untyped-call]

    def _look_from_loss(self) -> None:
        gradient = self._sentinel.gradient
        if gradient is not None and self._first is None:
            self._first, self._version = weakref.ref(gradient), gradient._version
        self._accumulated(self._sentinel.observe())

    def before_read(self) -> None:
        """See `StepObserver`."""
        if self._sentinel.is_hooked or self._first is None:
            return
        # Another tensor, or one changed more often than the logged losses explain, may have been cleared in between.
        now = self._sentinel.gradient
        num_changes = 0 if now is None else now._version - self._version
        if self._first() is not now or num_changes > _CHANGES * self._num_looks:
            self._is_clean = True

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        self._num_steps += 1
        if self._num_looks:
            self._num_judged += 1
        # Armed by the first step: what is in `.grad` before it may be meant.
        if self._num_steps > 1 and self._least is not None and not self._is_clean:
            least = scalars.collect([(wire.Column("least"), self._least)])
            self._watched.emit(
                CheckReport(
                    step=step,
                    time=time.time(),
                    watch=self._watched.name,
                    tally=self._tally,
                    judge=lambda: _judge(least.row()[0]),
                )
            )
        if self._num_steps == _TELL_AFTER and self._num_judged == 0:
            why = self._sentinel.problem or "no loss was logged as a tensor before backward()"
            self._watched.unavailable(f"check/{CHECK}", f"not checked: {why}")
        self._begin()
        return ()

    def close(self) -> None:
        """See `StepObserver`."""


def _judge(least: float) -> Finding | None:
    if not least > 0.0:
        return None
    return Finding(
        check=CHECK,
        severity="error",
        title="Gradients are not cleared between optimizer steps",
        text="Every backward pass of this step found the gradients of the step before still in place and added to "
        "them, so the optimizer steps along the sum of all gradients so far instead of this batch's gradient.",
        advice="Call optimizer.zero_grad() once per optimizer step, before the first backward(). For gradient "
        "accumulation call it only after optimizer.step().",
        facts={"old_gradient_abs_max": least},
    )
