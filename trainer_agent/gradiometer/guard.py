"""The one broad except of the trainer's side: whatever breaks in the agent, the training goes on.

A *part* is a piece of the agent that can be lost alone (the gradient capture of one watch, the forward probe, ...).
A part that fails is switched off after `limit` failures; each failure is counted, the first is logged with its
traceback. Nothing that the guard calls can raise an `Exception` into the training loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

_log: Final = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Runs the agent's code inside the training process and keeps its errors there.

    Args:
        on_failure: told the part and the error of its first failure; itself guarded.

    Attributes:
        spent_s: the agent's own time on the training thread, all that was booked so far.
        entry_s: booked beside what the clock shows whenever the training enters the agent; see `capture/entry_cost.py`.
    """

    def __init__(self, on_failure: Callable[[str, Exception], None] | None = None) -> None:
        self._on_failure = on_failure
        self.spent_s = self.entry_s = 0.0
        self._is_inside, self._started_s = False, 0.0
        self.failures: dict[str, int] = {}
        self._off: set[str] = set()

    def agent_s(self, now_s: float) -> float:
        """`spent_s` at `now_s` of `time.perf_counter`, with what the call under way has taken so far."""
        return self.spent_s + (now_s - self._started_s if self._is_inside else 0.0)

    def is_off(self, part: str) -> bool:
        """Whether `part` was switched off."""
        return part in self._off

    def switch_off(self, part: str) -> None:
        """Make every later `call` of `part` do nothing."""
        self._off.add(part)

    # Hot path: called from every hook. One set lookup and a call; it must not allocate or log when all is well.
    def call(self, part: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Call `function`; an error switches `part` off. Returns None for a part that is off or fails."""
        if part in self._off:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  the promise of this module: training never fails because of us
            self._failed(part, error, switch_off=True)
            return None

    def tolerate(self, part: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Like `call`, for a part that stays on: one bad call says nothing about the next."""
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  as above
            self._failed(part, error, switch_off=False)
            return None

    # Hot path: `call` and two looks at a clock.
    def entered(self, part: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Like `call`, for what the training calls: the time that it takes is booked, once where one is in another."""
        if self._is_inside:
            return self.call(part, function, *args, **kwargs)
        started_s = self._started_s = time.perf_counter()
        self._is_inside = True
        try:
            return self.call(part, function, *args, **kwargs)
        finally:
            self._is_inside = False
            self.spent_s += time.perf_counter() - started_s + self.entry_s

    def entered_tolerantly(
        self, part: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R | None:
        """Like `tolerate`, and booked like `entered`."""
        if self._is_inside:
            return self.tolerate(part, function, *args, **kwargs)
        started_s = self._started_s = time.perf_counter()
        self._is_inside = True
        try:
            return self.tolerate(part, function, *args, **kwargs)
        finally:
            self._is_inside = False
            self.spent_s += time.perf_counter() - started_s + self.entry_s

    def _failed(self, part: str, error: Exception, *, switch_off: bool) -> None:
        count = self.failures.get(part, 0) + 1
        self.failures[part] = count
        if switch_off:
            self._off.add(part)
        if count > 1:
            return
        consequence = "It is switched off" if switch_off else "This call had no effect"
        _log.error(
            "gradiometer: %s failed: %r. %s; the training goes on.", part, error, consequence, exc_info=error
        )
        if self._on_failure is not None:
            try:
                self._on_failure(part, error)
            except Exception as second:  # noqa: BLE001  a failing report of a failure must not reach the training
                _log.error("gradiometer: could not report the failure of %s: %r", part, second)
