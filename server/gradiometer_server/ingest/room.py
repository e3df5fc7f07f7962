"""What all connections together may hold: a thousand of them, each with a window of its own, would fill the memory.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

ROOM_BYTES: Final = 96 * 1024 * 1024
"""Of messages that were received and not answered. Decoded, and on their way to the log, they take three times that."""
WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Most that one agent may have in flight; with many of them it is less."""
SMALLEST_WINDOW_BYTES: Final = 64 * 1024
_WINDOWS_BYTES: Final = 256 * 1024 * 1024
"""Of all windows together. They are seldom full, and what is beyond the room waits in the sockets."""


class Room:
    """Bytes that are held now, in the order in which they were asked for."""

    def __init__(self, limit_bytes: int = ROOM_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.held_bytes = 0
        self.num_connections = 0

    def window_bytes(self) -> int:
        """What to tell an agent that says hello now."""
        share = _WINDOWS_BYTES // max(1, self.num_connections)
        return max(SMALLEST_WINDOW_BYTES, min(WINDOW_BYTES, share))

    async def take(self, num_bytes: int) -> None:
        """Hold so many bytes more as soon as there is room; whatever is asked for fits when nothing is held."""
        if not self._waiting and self._fits(num_bytes):
            self.held_bytes += num_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(num_bytes)
            raise

    def give_back(self, num_bytes: int) -> None:
        """So many bytes are no longer held."""
        self.held_bytes -= num_bytes
        while self._waiting:
            wanted, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
                continue
            if not self._fits(wanted):
                return
            self._waiting.popleft()
            self.held_bytes += wanted
            turn.set_result(None)

    def _fits(self, num_bytes: int) -> bool:
        return not self.held_bytes or self.held_bytes + num_bytes <= self._limit_bytes
