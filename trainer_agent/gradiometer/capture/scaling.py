"""What a GradScaler did to the gradients, read without `get_scale()`, which would stop the training for the device."""

from __future__ import annotations

from typing import Any

import torch


def is_active(scaler: Any) -> bool:
    """Whether `scaler` scales at all; a disabled one only passes calls on."""
    return scaler is not None and bool(scaler.is_enabled())


def is_scaler(scaler: Any) -> bool:
    """Whether `scaler` has what is used here of torch's GradScaler; None is a loop without one."""
    if scaler is None:
        return True
    if not callable(getattr(scaler, "is_enabled", None)):
        return False
    # A disabled scaler has no state.
    needed = ("step", "unscale_", "_per_optimizer_states")
    return not scaler.is_enabled() or all(hasattr(scaler, name) for name in needed)


def has_scaled(scaler: Any) -> bool:
    """Whether `scaler.scale` was ever called."""
    return getattr(scaler, "_scale", None) is not None


def scale_of(scaler: Any) -> torch.Tensor | None:
    """A copy of the loss scale, a 0-dim tensor on its device; None before the first `scaler.scale(loss)`.

    A copy, because `update()` changes the tensor in place.
    """
    scale: torch.Tensor | None = getattr(scaler, "_scale", None)
    return None if scale is None else scale.detach().clone()


def stage_of(scaler: Any, optimizer: Any) -> str:
    """READY (gradients are still multiplied by the scale), UNSCALED or STEPPED."""
    # .get: the dict makes an entry for whatever it is asked, which would be a change in the user's scaler.
    state = scaler._per_optimizer_states.get(id(optimizer))
    return "READY" if state is None else str(state["stage"].name)


def unscales_itself(optimizer: Any) -> bool:
    """Whether the optimizer's own kernel divides by the scale (fused optimizers), so that nobody does it before."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def found_inf_of(optimizer: Any) -> torch.Tensor | None:
    """Whether a fused step found non-finite gradients and was a no-op; the scaler's fresh tensor, set during the step."""
    found: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    return found


def grad_scale_of(optimizer: Any) -> torch.Tensor | None:
    """The scale a fused step divides by; None if the gradients were unscaled before, or there is no scaler."""
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    return None if scale is None else scale.detach().clone()
