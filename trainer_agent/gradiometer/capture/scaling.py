"""What a GradScaler did to the gradients, read without `get_scale()`, which would stop the training for the device."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class StepListener(Protocol):
    """Follows optimizers. Must not raise."""

    def num_ended(self, optimizer: Any) -> int | None:
        """Steps seen so far of `optimizer`, wrapped or not; None if it is not followed."""
        ...

    def before_scaler_step(self, optimizer: Any) -> None:
        """`scaler.step` was called for the optimizer."""
        ...

    def after_scaler_step(self, optimizer: Any, num_ended_before: int) -> None:
        """`scaler.step` returned; `num_ended_before` is `num_ended` as it was when it was called."""
        ...


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


class ScalerStep:
    """Stands in for `scaler.step` on the instance; a copy or a pickle of the scaler gets the plain method."""

    def __init__(self, scaler: Any, watch: StepListener) -> None:
        self._scaler = scaler
        self._watch: StepListener | None = watch
        self._had_own = "step" in vars(scaler)
        self._original = scaler.step
        scaler.step = self

    def __call__(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        num_ended = None if watch is None else watch.num_ended(optimizer)
        if watch is None or num_ended is None:
            return self._original(optimizer, *args, **kwargs)
        watch.before_scaler_step(optimizer)
        # Outside every guard: an error of the training is the user's to see.
        result = self._original(optimizer, *args, **kwargs)
        watch.after_scaler_step(optimizer, num_ended)
        return result

    def remove(self) -> None:
        """Give the scaler its method back; if another wrapper sits on top, only stop looking."""
        self._watch = None
        if vars(self._scaler).get("step") is not self:
            return
        if self._had_own:
            self._scaler.step = self._original
        else:
            del self._scaler.step

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self._scaler, "step"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._scaler))
        return self._original if copied is None else type(copied).step.__get__(copied)
