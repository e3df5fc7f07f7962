"""What it costs to get from the training into the agent and back: the part of a hook that no clock inside it can see.

Torch calls a module with a hook in another way than one without, the hook asks whether it is wanted, and only then does
the guard look at a clock. Measured once per process, with the forward probe's own hook on a module that does nothing.
"""

from __future__ import annotations

import functools
import time
from typing import Final

import torch

from gradiometer.capture.forward import ForwardProbe
from gradiometer.guard import Guard

_ROUNDS: Final = 15
_CALLS: Final = 50
"""Some 3 ms in all."""


class _Nothing(torch.nn.Module):
    def forward(self) -> None:
        """Compute nothing."""


@functools.cache
def seconds() -> float:
    """Seconds per call of `Guard.entered` beyond those that it books; of 15 rounds the quickest, as others only disturb."""
    guard = Guard()
    hooked, bare = _Nothing(), _Nothing()
    probe = ForwardProbe(hooked, guard)
    try:
        with torch.enable_grad():
            free_s = min(_lap(bare) for _ in range(_ROUNDS))
            unbooked_s = min(_unbooked_lap(hooked, guard) for _ in range(_ROUNDS))
    finally:
        probe.close()
    return max(0.0, unbooked_s - free_s) / _CALLS


def _lap(module: torch.nn.Module) -> float:
    started_s = time.perf_counter()
    for _ in range(_CALLS):
        module()
    return time.perf_counter() - started_s


def _unbooked_lap(module: torch.nn.Module, guard: Guard) -> float:
    before_s = guard.spent_s
    return _lap(module) - (guard.spent_s - before_s)
