"""Sees the gradients just before `torch.nn.utils.clip_grad_norm_` changes them, however the user imported it.

Clipping makes attribution impossible: one NaN in one parameter becomes NaN everywhere, one Inf makes every other
gradient 0. `clip_grad_norm_`, `get_total_norm` and every alias taken earlier end in one private function object,
`torch.nn.utils.clip_grad._get_total_norm`, a `no_grad` wrapper whose only closure cell holds the real function; so
the cell is patched. If torch no longer looks like that, the module's attributes are replaced, which misses only
`from torch.nn.utils import clip_grad_norm_` done earlier. FSDP1 has its own method, patched on the class.

The functions that change gradients, `_clip_grads_with_norm_` and `clip_grad_value_`, are patched in the same way, so that
a change that clipping made can be told from one that another backward pass made.

A clip inside a compiled function is let alone, because to look at its gradients would break its graph; it only leaves
word that it was there.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch


class ClipListener(Protocol):
    """Told about clipping. Must not raise."""

    def before_clip(self, gradients: list[torch.Tensor]) -> None:
        """`gradients` are about to be measured, or changed, by clipping."""
        ...

    def after_clip(self, gradients: list[torch.Tensor], total_norm: torch.Tensor, over_ranks: bool) -> None:
        """Clipping measured `total_norm` for them; `over_ranks`: in a way that knows FSDP1's flat shards."""
        ...

    def after_change(self, limit: Any = None) -> None:
        """Clipping changed the gradients of the last `before_clip` in place, to keep them below `limit`."""
        ...


OWN_SHARD: Final = (
    "torch.nn.utils.clip_grad_norm_ measures only this rank's own part of these gradients, so every rank clips by "
    "another norm; with FSDP1 call the clip_grad_norm_ method of the FSDP model"
)

COMPILED: Final = (
    "clip_grad_norm_ runs inside a compiled function, where nothing can look on without breaking its graph: statistics "
    "are of the gradients after clipping"
)


class _Unseen:
    """Whether a compiled clip ran. The compiler carries the assignment out beside its graph, without a break."""

    happened = False


_unseen: Final = _Unseen()
SPREAD: Final = (
    "this torch's clip_grad_norm_ returned a norm of which each rank holds a part; the whole is total_norm.full_tensor(), "
    "a collective, which only your own loop may call"
)

_CHANGING: Final = ("_clip_grads_with_norm_", "clip_grad_value_")
_listeners: Final[list[ClipListener]] = []
_undo: Final[list[Callable[[], None]]] = []
_lock: Final = threading.Lock()


def was_compiled() -> bool:
    """Whether a clip ran that could not be seen since the first `subscribe`."""
    return _unseen.happened


def subscribe(listener: ClipListener) -> str | None:
    """Tell `listener` about every clip in this process; returns what will be missed, or None."""
    with _lock:
        problem = None
        if not _undo:
            _unseen.happened = False
            problem = _patch()
        _listeners.append(listener)
        return problem


def unsubscribe(listener: ClipListener) -> None:
    """Undo `subscribe`; after the last one torch is as it was."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners:
            while _undo:
                _undo.pop()()


def _patch() -> str | None:
    from torch.nn.utils import clip_grad

    problem = None
    if not _patch_cell(getattr(clip_grad, "_get_total_norm", None), _observing):
        problem = _patch_attributes(clip_grad)
    for name in _CHANGING:
        _patch_changing(clip_grad, name)
    _patch_fsdp1()
    return problem


def _patch_cell(wrapper: Any, observing: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    cells = getattr(wrapper, "__closure__", None)
    if not cells or len(cells) != 1 or not callable(cells[0].cell_contents):
        return False
    cell = cells[0]
    original = cell.cell_contents
    patched = observing(original)
    cell.cell_contents = patched

    def undo() -> None:
        # Somebody may have patched on top of us; then our layer stays, without listeners, and only passes on.
        if cell.cell_contents is patched:
            cell.cell_contents = original

    _undo.append(undo)
    return True


def _patch_attributes(clip_grad: Any) -> str | None:
    original = getattr(clip_grad, "clip_grad_norm_", None)
    if original is None:
        return "this torch has no clip_grad_norm_: statistics are of the gradients as the optimizer gets them"
    patched = _observing_parameters(original)
    modules: tuple[Any, ...] = (clip_grad, torch.nn.utils)
    for module in modules:
        module.clip_grad_norm_ = patched
        _undo.append(functools.partial(setattr, module, "clip_grad_norm_", original))
    return (
        "this torch hides its norm function: a clip_grad_norm_ imported by name before watch() is not seen, and "
        "statistics are then of the clipped gradients"
    )


def _patch_changing(clip_grad: Any, name: str) -> None:
    original = getattr(clip_grad, name, None)
    if original is None or _patch_cell(original, _observing_change):
        return
    # clip_grad_norm_ looks its second half up in the module at every call.
    setattr(clip_grad, name, _observing_change(original))
    _undo.append(functools.partial(setattr, clip_grad, name, original))


def _patch_fsdp1() -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    if kind is None:
        return
    original = kind.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(self: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        _tell_before(gradients)
        norm = original(self, *args, **kwargs)
        _tell_after(gradients, norm, over_ranks=True)
        _tell_changed(_limit_in(args, kwargs))
        return norm

    kind.clip_grad_norm_ = clip_grad_norm_
    _undo.append(functools.partial(setattr, kind, "clip_grad_norm_", original))


def _observing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _unseen.happened = True
            return original(tensors, *args, **kwargs)
        # The argument may be a generator, which can be walked once.
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # Before the original, because that can raise (mixed meshes).
        _tell_before(gradients)
        norm = original(gradients, *args, **kwargs)
        _tell_after(gradients, norm)
        return norm

    return get_total_norm


def _observing_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _unseen.happened = True
            return original(parameters, *args, **kwargs)
        owners = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [owner.grad for owner in owners if owner.grad is not None]
        _tell_before(gradients)
        norm = original(owners, *args, **kwargs)
        _tell_after(gradients, norm)
        _tell_changed(_limit_in(args, kwargs))
        return norm

    return clip_grad_norm_


def _observing_change(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def changing(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _unseen.happened = True
            return original(parameters, *args, **kwargs)
        owners = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        _tell_before([owner.grad for owner in owners if owner.grad is not None])
        result = original(owners, *args, **kwargs)
        _tell_changed(_limit_in(args, kwargs))
        return result

    return changing


def _tell_before(gradients: list[torch.Tensor]) -> None:
    for listener in tuple(_listeners):
        listener.before_clip(gradients)


def _tell_after(gradients: list[torch.Tensor], total_norm: Any, *, over_ranks: bool = False) -> None:
    for listener in tuple(_listeners):
        listener.after_clip(gradients, total_norm, over_ranks)


def _limit_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bound that a clipping function was called with, after the parameters."""
    return args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))


def _tell_changed(limit: Any) -> None:
    for listener in tuple(_listeners):
        listener.after_change(limit)
