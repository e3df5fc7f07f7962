"""What was read for one optimizer in the step under way, and whether it still is what the gradients are.

A watch reads at the first of: clipping, the end of a closure, `scaler.step`, the optimizer's step pre-hook.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gradiometer.capture import readback, scaling
from gradiometer.capture.gradients import GradientReader, Partials
from gradiometer.capture.readback import Readback
from gradiometer.capture.witness import Witness, Witnesses
from gradiometer.guard import Guard


class StepReading:
    """The gradients of one optimizer in the step under way.

    Args:
        optimizer: a `torch.optim.Optimizer`, already unwrapped.
        scaler: the GradScaler, or None.
        is_only: whether all that the reader reads belongs to this optimizer.

    Attributes:
        partials: what was read; None: nothing yet.
        scale: the loss scale that the gradients were multiplied by when they were read; None: by none.
        witness: the smallest gradient that was read, kept until the step ends.
        witnesses: all gradients that were read, where the loop may change some of them before the step.
        num_gradients: how many were read.
        clips_what_was_read: the clip under way changes gradients that were read before.
        in_closure: `step(closure)` may compute the gradients itself.
        was_read_in_closure: it did, and they were read.
        is_stepping: between the optimizer's pre-hook and its post-hook.
        skip: not zero if the scaler skipped the step.
        rates: learning rates of the optimizer's groups, as they were used.
        num_ended: steps seen so far.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        reader: GradientReader,
        guard: Guard,
        *,
        is_only: bool,
    ) -> None:
        self.optimizer = optimizer
        self._scaler, self._reader, self._guard = scaler, reader, guard
        self._of = None if is_only else optimizer
        self.num_ended = 0
        self.reset()

    def reset(self) -> None:
        """Forget the step: another begins."""
        self.in_closure = self.is_stepping = False
        self.skip: Readback | None = None
        self.rates: list[float | torch.Tensor | None] = []
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Nothing was read."""
        self.partials: Partials | None = None
        self.scale: Readback | None = None
        self.witness: Witness | None = None
        self.witnesses: Witnesses | None = None
        self.num_gradients = 0
        self.clips_what_was_read = self.was_read_in_closure = False

    def is_frozen(self) -> bool:
        """Whether none of its parameters is trained."""
        return not any(
            parameter.requires_grad for group in self.optimizer.param_groups for parameter in group["params"]
        )

    @property
    def has_plain_shards(self) -> bool:
        """Whether the gradients that were read are this rank's pieces though torch cannot tell."""
        return self.partials is not None and self.partials.layout.has_plain_shards

    def owns_any(self, ids: set[int]) -> bool:
        """Whether one of its gradients is among these `id`s."""
        return any(
            owner.grad is not None and id(owner.grad) in ids for owner in self._reader.owners(self._of)
        )

    def must_read(self) -> bool:
        """Whether nothing was read, or not the gradients that are there now.

        The latter where a loop measures the norm of every micro-batch, or clips and leaves out `optimizer.step()`.
        """
        if self.partials is None:
            return True
        if self.in_closure and self.was_read_in_closure:
            # LBFGS evaluates its closure many times per step; the first gradient is the one at the step's start.
            return False
        if self.witness is None or self.witness.is_outdated():
            return True
        return self.witnesses is not None and self.witnesses.are_outdated()

    def expect_changes(self) -> None:
        """It was read before its step: the loop may add to some gradients and not to others until then."""
        if self.witness is not None:
            self.witnesses = Witnesses(self._reader.owners(self._of))

    def accept_clip(self) -> None:
        """Clipping changed the gradients in place."""
        if self.clips_what_was_read and self.witness is not None:
            self.witness.accept()
            if self.witnesses is not None:
                self.witnesses.accept()

    def has_new_gradients(self) -> bool:
        """Whether another backward pass ran since the gradients were read."""
        return self.witness is not None and self.witness.owner.grad is not None and self.witness.is_outdated()

    # Hot path: training thread, once per step.
    def read(self) -> None:
        """Read the gradients as they are now."""
        self.forget_gradients()
        self.was_read_in_closure = self.in_closure
        scale = self._current_scale()
        self.scale = None if scale is None else readback.start(readback.pack([scale]))
        owners = self._reader.owners(self._of)
        # Held during the reading, because torch makes the Python object of a gradient anew for whoever asks next.
        gradients = [owner.grad for owner in owners]
        self.partials = self._reader.read(self._of)
        self.num_gradients = sum(gradient is not None for gradient in gradients)
        smallest = next((owner for owner in owners if owner.grad is not None), None)
        if smallest is not None:
            self.witness = Witness(smallest)

    def is_scaled(self) -> bool:
        """Whether the gradients are multiplied by the loss scale right now."""
        scaler = self._scaler
        return (
            scaler is not None
            and scaling.has_scaled(scaler)
            and scaling.stage_of(scaler, self.optimizer) == "READY"
        )

    def _current_scale(self) -> torch.Tensor | None:
        inside_fused_step = scaling.grad_scale_of(self.optimizer)
        if inside_fused_step is not None:
            return inside_fused_step
        return scaling.scale_of(self._scaler) if self.is_scaled() else None

    def unscale_as_the_step_will(self) -> None:
        """Do what `scaler.step` is about to do, so that a step that is skipped, when no hook fires, is read too."""
        if self.is_scaled() and not scaling.unscales_itself(self.optimizer):
            started_s = time.perf_counter()
            self._scaler.unscale_(self.optimizer)
            # The training's own work, done for it: the agent must not be charged for it.
            self._guard.spent_s -= time.perf_counter() - started_s

    # Hot path: training thread, once per step.
    def end(self, skip: Readback | None) -> None:
        """The optimizer stepped, or was skipped: keep what is only known now."""
        self.num_ended += 1
        self.is_stepping = False
        self.skip = skip if skip is not None else self._skip_of_fused_step()
        self.rates = [_kept(group.get("lr")) for group in self.optimizer.param_groups]

    def _skip_of_fused_step(self) -> Readback | None:
        found_inf = scaling.found_inf_of(self.optimizer)
        if found_inf is not None:
            return readback.start(readback.pack([found_inf]))
        return readback.KNOWN_ZERO if self._scaler is not None else None


def _kept(rate: Any) -> float | torch.Tensor | None:
    if rate is None:
        return None
    # A scheduler changes a tensor in place.
    return rate.detach().clone() if isinstance(rate, torch.Tensor) else float(rate)
