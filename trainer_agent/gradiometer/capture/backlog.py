"""Bounds the memory of readings that the agent's thread has not written yet, in pinned memory or in ordinary one.

A reading is small, but a stalled disk can hold up thousands of them, and pinned memory that torch's allocator has once
taken is never given back to the system.
"""

from __future__ import annotations

from typing import Final

MAX_BYTES: Final = 256 * 1024 * 1024
"""Of one watch: 20 s of a stalled disk at 100 steps per second and 2,000 parameters."""
BEHIND: Final = "the agent's thread has not kept up: steps are left out until it has"


class Backlog:
    """What is held of the readings of one watch. The training thread takes, any thread gives back."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        # One entry each, because adding to a common sum from two threads loses some.
        self._held: dict[int, int] = {}

    # Hot path: training thread, once per optimizer step. Usually one or two entries.
    def is_full(self) -> bool:
        """Whether no more is to be read."""
        return sum(list(self._held.values())) >= self._max_bytes

    def hold(self, num_bytes: int) -> Hold:
        """Book a reading, for as long as the hold lives."""
        return Hold(self._held, num_bytes)


class Hold:
    """Gives back what it holds when nobody has it any more: when the report was written, or was dropped."""

    __slots__ = ("_held",)

    def __init__(self, held: dict[int, int], num_bytes: int) -> None:
        self._held = held
        held[id(self)] = num_bytes

    def __del__(self) -> None:
        self._held.pop(id(self), None)
