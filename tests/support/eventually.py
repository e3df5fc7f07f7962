"""Waiting for a condition instead of sleeping for a guess."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T], timeout_s: float = 10.0, *, what: str = "", interval_s: float = 0.02
) -> T:
    """Call `condition` until it returns something true, and return that.

    An `AssertionError` raised inside the condition means "not yet", so a condition may be written as assertions
    that return a true value at the end. Any other exception is a defect and passes through at once.

    Raises:
        AssertionError: the time is up; the message holds the last value or the last failed assertion.
    """
    deadline_s = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            value = condition()
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline_s:
            name = what or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not within {timeout_s:g} s: {name}; last seen: {last!r}")
        time.sleep(interval_s)
