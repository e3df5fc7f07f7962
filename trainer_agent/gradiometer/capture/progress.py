"""Tells whether the work for the next optimizer step has begun.

So a loss logged before `optimizer.step()` and one logged after it both land on the step they belong to.
Nothing is read from a device: a forward pass in training mode shows in the forward probe, a backward pass shows in
one small gradient, which is another tensor, or the same one changed in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch.nn.parameter import is_lazy

from gradiometer.capture import layout
from gradiometer.capture.forward import ForwardProbe

_ZEROED_ONLY: Final = 1
"""In-place changes of a gradient that `zero_grad(set_to_none=False)` makes; a backward pass adds at least one."""


class NextStep:
    """Remembers one gradient as a step left it.

    Args:
        parameters: the watched parameters; the smallest trainable one serves until a step is complete.
        probe: the forward probe, where there is one.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], probe: ForwardProbe | None) -> None:
        self._probe = probe
        self._parameter: torch.Tensor | None = None
        # A lazy parameter has no size before the first forward pass.
        trainable = [
            parameter for parameter in parameters if parameter.requires_grad and not is_lazy(parameter)
        ]
        self.begin_after(min(trainable, key=torch.Tensor.numel, default=None))

    def begin_after(self, parameter: torch.Tensor | None) -> None:
        """A step is complete; `parameter` had a gradient in it. None: keep looking at the one from before."""
        if parameter is not None:
            self._parameter = parameter
        gradient = None if self._parameter is None else self._parameter.grad
        # Weakly: where the smallest gradient is a large one, as in FSDP1's flat parameters, keeping it costs memory.
        self._gradient = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else layout.local_of(gradient)._version

    # Hot path: training thread, once per `log` without a step. Must read no value.
    def has_begun(self) -> bool:
        """Whether a forward or backward pass for the next step has been seen."""
        if self._probe is not None and self._probe.has_seen_any():
            return True
        now = None if self._parameter is None else self._parameter.grad
        if now is None:
            return False
        if self._gradient is None or now is not self._gradient():
            return True
        return layout.local_of(now)._version - self._version > _ZEROED_ONLY
