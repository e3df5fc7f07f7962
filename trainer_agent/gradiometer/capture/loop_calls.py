"""Sees when the training waits for a DataLoader and when it runs a backward pass, however it is written.

`DataLoader.__iter__` (which may start workers) and its iterators' `__next__` are patched on their classes, and
`torch.autograd.backward`, in which `Tensor.backward` ends too, in its module. `from torch.autograd import backward` done
before `watch()` is missed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.data import dataloader

from gradiometer import phases

_undo: Final[list[Callable[[], None]]] = []
_lock: Final = threading.Lock()


def subscribe(listener: phases.PhaseListener) -> None:
    """Tell `listener` about every wait and every backward pass in this process."""
    with _lock:
        if phases.subscribe(listener) and not _undo:
            _patch(dataloader.DataLoader, "__iter__", phases.DATA_WAIT)
            _patch(dataloader._BaseDataLoaderIter, "__next__", phases.DATA_WAIT)
            _patch(torch.autograd, "backward", phases.BACKWARD)


def unsubscribe(listener: phases.PhaseListener) -> None:
    """Undo `subscribe`; after the last one torch is as it was."""
    with _lock:
        if phases.unsubscribe(listener):
            while _undo:
                _undo.pop()()


def _patch(owner: Any, name: str, phase: int) -> None:
    original = getattr(owner, name)

    # Not `phases.timed`, whose code a loop that is not compiled uses too. The compiler must skip this frame, or it
    # would make graphs of it where it breaks a graph to call it; what is called from here is compiled as before.
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        phases.begin(phase)
        try:
            return original(*args, **kwargs)
        finally:
            phases.end(phase)

    patched: Any = _skipped_by_the_compiler(call)
    setattr(owner, name, patched)

    def undo() -> None:
        # Somebody may have patched on top of us; then our layer stays, and tells nobody.
        if getattr(owner, name) is patched:
            setattr(owner, name, original)

    _undo.append(undo)


def _skipped_by_the_compiler(function: Callable[..., Any]) -> Any:
    return torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]
