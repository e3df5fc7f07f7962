"""How long to wait before the next connection: exponential with jitter, reset by success. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.2
LONGEST_S: Final = 15.0


class Backoff:
    """Waiting times 0.2 s, 0.4 s, ... up to 15 s; all but the first are shortened at random by up to a half.

    Args:
        uniform: draws from [0, 1); injected so that tests know the draw.
    """

    def __init__(self, uniform: Callable[[], float]) -> None:
        self._uniform = uniform
        self._failures = 0

    def next_s(self) -> float:
        """Seconds to wait after one more failure."""
        longest_s = min(LONGEST_S, FIRST_S * 2.0 ** min(self._failures, 16))
        first, self._failures = self._failures == 0, self._failures + 1
        # Many nodes lose one server at the same moment: the jitter keeps them from coming back together.
        return longest_s if first else longest_s * (1.0 - 0.5 * self._uniform())

    def reset(self) -> None:
        """The server answered."""
        self._failures = 0
