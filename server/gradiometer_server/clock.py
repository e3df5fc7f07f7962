"""The only door to the time of day; tests hand in their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for durations."""

    def now_s(self) -> float:
        """Unix seconds."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now_s(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        return time.monotonic()
