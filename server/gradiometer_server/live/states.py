"""Tells browsers about runs that fell silent: nothing arrives for them, so nobody else would notice.

`lost` is derived from the age of the last heartbeat when a run is read, and is stored nowhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from gradiometer_server.domain.live import LiveUpdate, RunUpdate

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 2.0


class StateWatcher:
    """Compares, every `INTERVAL_S`, which runs are running with which were, and publishes the difference.

    Args:
        read_running: public ids of the runs that are running now.
        publish: the hub's.
    """

    def __init__(
        self,
        *,
        read_running: Callable[[], Awaitable[frozenset[str]]],
        publish: Callable[[Sequence[LiveUpdate]], None],
    ) -> None:
        self._read_running, self._publish = read_running, publish
        self._running: frozenset[str] | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_failures = 0

    def start(self) -> None:
        """Begin on the running event loop."""
        self._task = asyncio.create_task(self._watch(), name="run-states")

    async def stop(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Compare once."""
        now = await self._read_running()
        before, self._running = self._running, now
        changed = frozenset[str]() if before is None else before ^ now
        self._publish([RunUpdate(run_id=run_id) for run_id in sorted(changed)])

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - worker loop: the next look may succeed
                self.num_failures += 1
                logger.warning(
                    "cannot read the states of runs (%d times so far): %s", self.num_failures, error
                )
            await asyncio.sleep(INTERVAL_S)
