"""Whether code runs inside a backward pass, and when that pass ends: for optimizers that step inside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch

PER_PARAMETER: Final = (
    "the optimizers step inside the backward pass: each gradient is read per parameter, pre-clip, just before its own "
    "update, and the whole gradient is never there to be clipped"
)
_NONE: Final = -1


def task() -> int | None:
    """The number of the backward pass that this thread is in; None: it is in none."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    number = _NONE if current is None else int(current())
    return None if number == _NONE else number


def call_at_end(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass that this thread is in has ended."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def is_nested() -> bool:
    """Whether the backward pass that just ended ran inside another (activation checkpointing, the reentrant kind)."""
    around = getattr(getattr(torch.autograd.function, "BackwardCFunction", None), "apply", None)
    code = getattr(around, "__code__", None)
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
