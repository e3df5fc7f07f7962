"""Messages of one connection that were received and not yet worked on; holds at most about one window."""

from __future__ import annotations

import asyncio


class Inbox:
    """One task puts, another takes everything at once. When it is full, `put` waits, and so does the sender."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._messages: list[bytes] = []
        self._held_bytes = 0
        self._closed = False
        self._changed = asyncio.Condition()

    async def put(self, message: bytes) -> None:
        """Add a message as soon as there is room; one message always fits into an empty inbox."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._messages or self._fits(message))
            self._messages.append(message)
            self._held_bytes += len(message)
            self._changed.notify_all()

    def _fits(self, message: bytes) -> bool:
        return self._held_bytes + len(message) <= self._limit_bytes

    async def close(self) -> None:
        """No more messages will come."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take(self) -> list[bytes]:
        """All messages there are, waiting for the first; empty once the inbox is closed and drained."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._messages or self._closed)
            taken, self._messages, self._held_bytes = self._messages, [], 0
            self._changed.notify_all()
            return taken
