"""Tells whoever times the training in which phase of a step it is, and times loaders that nothing else can see.

Without torch, because a run offers `data` whether or not it watches a model.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER = range(4)
NAMES: Final = ("data_wait", "forward", "backward", "optimizer")


class PhaseListener(Protocol):
    """Told on the thread that enters or leaves a phase. Must not raise."""

    def begin(self, phase: int) -> None:
        """A phase begins, perhaps inside another."""
        ...

    def end(self, phase: int) -> None:
        """The phase ends, also where an exception ended it."""
        ...


_listeners: Final[list[PhaseListener]] = []
if hasattr(os, "register_at_fork"):
    # The child of a fork is a loader's worker: what it waits for is not what the training waits for.
    os.register_at_fork(after_in_child=_listeners.clear)


def subscribe(listener: PhaseListener) -> bool:
    """Tell `listener` about phases; returns whether it is the first."""
    _listeners.append(listener)
    return len(_listeners) == 1


def unsubscribe(listener: PhaseListener) -> bool:
    """Undo `subscribe`; returns whether it was the last."""
    if listener in _listeners:
        _listeners.remove(listener)
    return not _listeners


# Hot path: training thread, a few times per micro-batch.
def begin(phase: int) -> None:
    """A phase begins."""
    for listener in tuple(_listeners):
        listener.begin(phase)


def end(phase: int) -> None:
    """A phase ends."""
    for listener in tuple(_listeners):
        listener.end(phase)


def timed(phase: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, as a phase."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin(phase)
        try:
            return original(*args, **kwargs)
        finally:
            end(phase)

    return call


class TimedData:
    """An iterable whose items the training waits for; anything else that one asks it, it asks the original."""

    def __init__(self, original: Iterable[Any]) -> None:
        self._original = original

    def __iter__(self) -> Iterator[Any]:
        # At once, as a loader may start its workers here.
        return self._each(timed(DATA_WAIT, iter)(self._original))

    def _each(self, items: Iterator[Any]) -> Iterator[Any]:
        following = timed(DATA_WAIT, next)
        while True:
            try:
                item = following(items)
            except StopIteration:
                return
            yield item

    def __bool__(self) -> bool:
        return bool(self._original)

    def __len__(self) -> int:
        return len(self._original)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_original":
            # Not there yet while it is being copied or unpickled.
            raise AttributeError(name)
        return getattr(self._original, name)


class TimesData:
    """The part of a run that times how long the training waits for data."""

    id: str

    def data(self, loader: Iterable[Any]) -> Any:
        """`loader`, timed: `for batch in run.data(loader)`. Only needed for loaders that are no torch `DataLoader`.

        How long the training waits for its items is `time/data_wait_s` of a watched run. Attributes and `len` are
        those of the loader.
        """
        return TimedData(loader) if self.id else loader
