"""Stands in for one method of one object, and gives it back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Substitute:
    """Makes `owner.name(...)` call `around(original, *args, **kwargs)` until `remove`.

    Only this instance changes, never its class. A copy or a pickle of the owner has the plain method.

    Args:
        around: must call `original`, return what it returns, and let its errors through.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._around: Callable[..., Any] | None = around
        self._had_own = name in vars(owner)
        self._original = getattr(owner, name)
        # For whoever asks for its signature or its name.
        functools.update_wrapper(self, self._original, updated=())
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = self._around
        return self._original(*args, **kwargs) if around is None else around(self._original, *args, **kwargs)

    def remove(self) -> None:
        """Give the method back; if another wrapper sits on top, only pass calls on from now on."""
        self._around = None
        if vars(self._owner).get(self._name) is not self:
            return
        if self._had_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (self._owner, self._name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._owner))
        return self._original if copied is None else getattr(type(copied), self._name).__get__(copied)
