"""Check `clip_before_unscale`: gradients were clipped while they were still multiplied by the loss scale.

The bound then means bound/scale in true units. A bound that is sensible in true units was multiplied by the scale on
purpose, and an infinite one only measures; both are left alone.
"""

from __future__ import annotations

import math
import time
from typing import Any, Final

import torch

from gradiometer import wire
from gradiometer.capture import clip, scalars, scaling
from gradiometer.capture.checks.finding import CheckReport, Finding, Tally
from gradiometer.capture.checks.sentinel import optimizers_in, parameters_of
from gradiometer.capture.observer import StepScalars, Watched

CHECK: Final = "clip_before_unscale"
_SENSIBLE: Final = 0.01
"""A bound of the true gradients' norm below this is taken for one that was meant for unscaled gradients."""


class ClipBeforeUnscale:
    """Listens to clipping on its own account."""

    part = "check clip_before_unscale"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._tally = Tally()
        self._concerns_us = False
        self._pending: list[tuple[Any, torch.Tensor]] = []
        if watched.scaler is not None:
            clip.subscribe(self)

    def before_clip(self, gradients: list[torch.Tensor]) -> None:
        """See `clip.ClipListener`."""
        self._concerns_us = bool(self._watched.guard.entered(self.part, self._are_scaled, gradients))

    def after_clip(self, gradients: list[torch.Tensor], total_norm: torch.Tensor, over_ranks: bool) -> None:
        """See `clip.ClipListener`."""

    def after_change(self, limit: Any = None) -> None:
        """See `clip.ClipListener`."""
        if self._concerns_us:
            self._watched.guard.entered(self.part, self._note, limit)

    def _are_scaled(self, gradients: list[torch.Tensor]) -> bool:
        scaler = self._watched.scaler
        if not scaling.has_scaled(scaler):
            return False
        optimizers = optimizers_in(self._watched.optimizer)
        scaled = [one for one in optimizers if scaling.stage_of(scaler, one) == "READY"]
        ids = {id(gradient) for gradient in gradients} if scaled else set()
        return any(_owns_any(optimizer, ids) for optimizer in scaled)

    def _note(self, limit: Any) -> None:
        self._concerns_us = False
        scale = scaling.scale_of(self._watched.scaler)
        bound = scalars.local_scalar(limit) if isinstance(limit, torch.Tensor) else limit
        if scale is not None and bound is not None and not self._pending:
            self._pending.append((bound if isinstance(bound, torch.Tensor) else float(bound), scale))

    def before_read(self) -> None:
        """See `StepObserver`."""

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        if self._pending:
            bound, scale = self._pending.pop()
            both = scalars.collect([(wire.Column("bound"), bound), (wire.Column("scale"), scale)])
            self._watched.emit(
                CheckReport(
                    step=step,
                    time=time.time(),
                    watch=self._watched.name,
                    tally=self._tally,
                    judge=lambda: judge(*both.row()),
                )
            )
        return ()

    def close(self) -> None:
        """See `StepObserver`."""
        clip.unsubscribe(self)


def _owns_any(optimizer: Any, ids: set[int]) -> bool:
    return any(one.grad is not None and id(one.grad) in ids for one in parameters_of(optimizer))


def judge(bound: float, scale: float) -> Finding | None:
    """The finding for clipping scaled gradients to `bound` at loss scale `scale`."""
    if not (math.isfinite(bound) and math.isfinite(scale) and scale > 1.0) or bound / scale >= _SENSIBLE:
        return None
    return Finding(
        check=CHECK,
        severity="error",
        title=f"Gradients are clipped while still multiplied by the loss scale {scale:,.0f}",
        text=f"Clipping ran before scaler.unscale_(), so its bound of {bound:.3g} cut the true gradients to "
        f"{bound / scale:.3g}: nearly every step is clipped to almost nothing, and how much changes with the scale. The "
        "gradient norms shown here (grad/norm and the layers) are of the unscaled gradients before clipping; "
        "what your clip call returned is multiplied by the scale, and is kept as grad/clip_norm_scaled.",
        advice="Call scaler.unscale_(optimizer) once, after the last backward() and before clip_grad_norm_().",
        facts={"bound": bound, "scale": scale, "true_bound": bound / scale},
    )
