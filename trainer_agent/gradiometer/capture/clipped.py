"""The total norm that the user's own clip call returned, kept beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from gradiometer import wire
from gradiometer.capture import clip, scalars
from gradiometer.capture.observer import StepScalars
from gradiometer.capture.reading import StepReading

CLIPPED_SCALED: Final = (
    "clip_grad_norm_ ran before scaler.unscale_(optimizer): it measured, and clipped, gradients that were still "
    "multiplied by the loss scale; what it returned is kept as grad/clip_norm_scaled"
)
CHANGED: Final = (
    "the gradients changed between clip_grad_norm_ and optimizer.step() (noise for privacy, another backward pass): what it "
    "returned is not the norm of the gradients that the optimizer got, which is grad/norm"
)


class ClippedNorm:
    """The norm of the step under way, if all of its gradients were measured in one call.

    Args:
        unavailable: told why there is none, or none that can be compared with `grad/norm`.
    """

    def __init__(self, unavailable: Callable[[str, str], None]) -> None:
        self._unavailable = unavailable
        self.forget()

    def forget(self) -> None:
        """Another step begins."""
        self._norm: torch.Tensor | None = None
        self._name, self._lost_name = "", ""

    def outdate(self) -> None:
        """Other gradients take the place of those that were measured."""
        lost_name = self._lost_name if self._norm is None else self._name
        self.forget()
        self._lost_name = lost_name

    # Hot path: training thread. Must not read the norm.
    def see(
        self,
        readings: Sequence[StepReading],
        gradients: list[torch.Tensor],
        total_norm: Any,
        *,
        over_ranks: bool,
    ) -> None:
        """Clipping measured `total_norm` for `gradients`; see `clip.ClipListener.after_clip`."""
        read = [reading for reading in readings if reading.partials is not None]
        # A norm of some of the gradients is not this step's norm.
        if not gradients or len(gradients) != sum(reading.num_gradients for reading in read):
            return
        witnesses = {id(reading.witness.gradient) for reading in read if reading.witness is not None}
        if any(reading.has_plain_shards for reading in read) and not over_ranks:
            self._unavailable("grad/clip_norm", clip.OWN_SHARD)
        elif any(id(gradient) in witnesses for gradient in gradients):
            is_scaled = any(reading.is_scaled() for reading in read)
            if is_scaled:
                self._unavailable("grad/clip_norm", CLIPPED_SCALED)
            self._name = "grad/clip_norm_scaled" if is_scaled else "grad/clip_norm"
            self._norm = scalars.local_scalar(total_norm)
            if self._norm is None and isinstance(total_norm, torch.Tensor):
                self._unavailable(self._name, clip.SPREAD)

    def scalars(self) -> StepScalars:
        """For the report of the step."""
        if self._norm is None and self._lost_name:
            self._unavailable(self._lost_name, CHANGED)
        return () if self._norm is None else [(wire.Column(self._name), self._norm)]
