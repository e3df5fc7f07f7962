"""Hides the agent's forward hooks from `torch.jit.script`, which would try to compile them and fail the user's call.

Scripting compiles every forward hook it finds. `torch.jit._recursive.get_hook_stubs` is where it looks; where torch has
no such function, nothing is patched, and a watched model cannot be scripted. A copy of a watched model has hooks that do
nothing in the places of ours; they are hidden as well, as long as such a copy lives.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any, Final

import torch

_NAME: Final = "get_hook_stubs"
# The garbage collector may end a copy's life in the middle of anything.
_lock: Final = threading.RLock()
_users: Final[list[object]] = []
_kinds: Final[set[type]] = set()
_original: Any = None
_patched: Any = None


class LeftBehind:
    """A hook that does nothing, in a copy of a watched model: the run watches the original."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        token = object()
        hide(token, LeftBehind)
        weakref.finalize(self, show, token).atexit = False

    def __call__(self, *_args: Any) -> None:
        """Change nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A bound method of nullcontext takes what a hook takes and returns None. It is in every Python, so a copy that
        # is saved whole (the average of weights, the best model so far) can be loaded where this package is not installed.
        return (getattr, (contextlib.nullcontext(), "__exit__"))

    def __deepcopy__(self, _memo: Any) -> LeftBehind:
        return LeftBehind()


def hide(user: object, kind: type) -> None:
    """Until `show(user)`, let `torch.jit.script` see no hooks of this kind."""
    global _original, _patched
    home: Any = torch.jit._recursive
    with _lock:
        _users.append(user)
        _kinds.add(kind)
        if _patched is None and hasattr(home, _NAME):
            _original = getattr(home, _NAME)
            _patched = _without_ours(_original)
            setattr(home, _NAME, _patched)


def show(user: object) -> None:
    """Undo `hide`; after the last one torch is as it was."""
    global _original, _patched
    home: Any = torch.jit._recursive
    with _lock:
        if user in _users:
            _users.remove(user)
        # Somebody may have patched on top of us; then our layer stays, and hides what is no longer there.
        if not _users and _patched is not None and getattr(home, _NAME) is _patched:
            setattr(home, _NAME, _original)
            _original = _patched = None


def _without_ours(original: Any) -> Any:
    @functools.wraps(original)
    def get_hook_stubs(module: Any) -> Any:
        tables = (module._forward_hooks, module._forward_pre_hooks)
        before = [dict(hooks) for hooks in tables]
        for hooks in tables:
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
        try:
            return original(module)
        finally:
            # All of them anew, so that they keep their order.
            for hooks, all_of_them in zip(tables, before, strict=True):
                hooks.clear()
                hooks.update(all_of_them)

    return get_hook_stubs


def _is_ours(hook: Any) -> bool:
    # A copy that was pickled has methods of nullcontext.
    return isinstance(hook, tuple(_kinds)) or isinstance(
        getattr(hook, "__self__", None), contextlib.nullcontext
    )
