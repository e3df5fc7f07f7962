"""One small parameter that is looked at whenever a backward pass adds to its gradient.

A hook on the parameter sees what is in `.grad` before the addition; a second one, after it, tells an addition from
`torch.autograd.grad`, which adds nothing. FSDP's parameters get no such hooks called: there the hook on a logged loss
serves, and the gradient must be the same tensor until the step, changed as often as there were backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from gradiometer.capture import layout
from gradiometer.capture.observer import StepScalars, Watched

Before = torch.Tensor | None
"""Largest absolute value in `.grad` before an addition, a 0-dim tensor; None: there was no gradient."""
_MAX_CHOICES: Final = 8
"""A parameter without a gradient in a step (a branch not taken) is replaced this often, then kept."""
FSDP1: Final = "FSDP1 makes new gradient tensors at every step"


class _Hook:
    """A hook on a parameter; a copy or a pickle of the model leaves it behind."""

    __torch_unserializable__ = True

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    # Hot path: training thread, once per backward pass. Must return None: anything else replaces the gradient.
    def __call__(self, _tensor: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call()


class Sentinel:
    """Chooses the parameter at the first step, and tells listeners about its accumulations."""

    part = "check sentinel"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._parameter: Any = None
        self._num_chosen = 0
        self._handles: list[Any] = []
        self._before: Before = None
        self._listeners: list[Callable[[Before], None]] = []
        self.is_hooked = False
        """Whether the parameter's own hooks are called; otherwise only a logged loss tells of a backward pass."""
        self.problem: str | None = "no gradient was seen"

    def subscribe(self, listener: Callable[[Before], None]) -> None:
        """Call `listener` with what was there before, after each addition to the gradient."""
        self._listeners.append(listener)

    @property
    def gradient(self) -> torch.Tensor | None:
        """This rank's part of the parameter's gradient."""
        gradient = None if self._parameter is None else self._parameter.grad
        if gradient is None:
            return None
        local: torch.Tensor = layout.local_of(gradient)
        return local

    # Hot path: training thread, once per backward pass. At most one small kernel; must read no value.
    @torch.no_grad()
    def observe(self) -> Before:
        """What is in `.grad` now."""
        gradient = self.gradient
        if gradient is None or gradient.layout != torch.strided:
            return None
        largest: torch.Tensor = torch.linalg.vector_norm(gradient.detach(), ord=float("inf"))
        return largest

    def before_read(self) -> None:
        """See `StepObserver`."""
        if self._num_chosen < _MAX_CHOICES and self.gradient is None:
            self._choose()

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        return ()

    def close(self) -> None:
        """See `StepObserver`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._parameter = None

    def _choose(self) -> None:
        found = min(
            filter(_can_serve, parameters_of(self._watched.optimizer)), key=torch.Tensor.numel, default=None
        )
        if found is None:
            return
        self.close()
        self._parameter = found
        self._num_chosen += 1
        self.problem = FSDP1 if _has_fsdp1(self._watched.model) else None
        self.is_hooked = self.problem is None and not layout.is_distributed(found)
        if self.is_hooked:
            hooked: Any = found
            self._handles = [
                hooked.register_hook(_Hook(self._accumulating)),
                hooked.register_post_accumulate_grad_hook(_Hook(self._accumulated)),
            ]

    def _accumulating(self) -> None:
        self._watched.guard.entered(self.part, self._look)

    def _look(self) -> None:
        if not _is_capturing(self._parameter):
            self._before = self.observe()

    def _accumulated(self) -> None:
        self._watched.guard.entered(self.part, self._tell)

    def _tell(self) -> None:
        before, self._before = self._before, None
        if not _is_capturing(self._parameter):
            for listener in self._listeners:
                listener(before)


def optimizers_in(optimizer: Any) -> tuple[Any, ...]:
    """The torch optimizers behind what a watch calls its optimizer: itself, or several that make one step."""
    return tuple(getattr(optimizer, "all", (optimizer,)))


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """All parameters in the optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _can_serve(parameter: Any) -> bool:
    if is_lazy(parameter) or not parameter.requires_grad or parameter.grad is None:
        return False
    local = layout.local_of(parameter.grad)
    return (
        local.numel() > 0 and local.layout == torch.strided and not local.is_complex() and not local.is_meta
    )


def _has_fsdp1(model: torch.nn.Module) -> bool:
    return any(getattr(module, "_handle", None) is not None for module in model.modules())


def _is_capturing(parameter: Any) -> bool:
    return parameter is not None and parameter.is_cuda and torch.cuda.is_current_stream_capturing()
