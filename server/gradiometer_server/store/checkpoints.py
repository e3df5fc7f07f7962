"""Moves SQLite's write-ahead log into the database file beside the writers rather than inside one of their commits.

Left to itself, SQLite does it in the commit that fills 1,000 pages: each ack behind that one waits for another 4 MB and
two more syncs. Most of the work here needs no lock; only what was written meanwhile is moved while writers wait, so that
the log can begin at its start again. Under one long read it cannot, and is tried again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

logger = logging.getLogger(__name__)

SAFETY_PAGES: Final = 32_768
"""128 MiB: here the commit itself does it after all, should this thread not come to it."""
_EVERY_S: Final = 1.0
_RESTART_PAGES: Final = 4096
"""From 16 MiB on it is worth a moment of the writers' time to let the log begin at its start again."""
_STOP_S: Final = 10.0


class Checkpointer:
    """A thread with a connection of its own.

    Args:
        connect: opens a `sqlite3` connection that this thread may use.
        turn: the turn of the only writer.
    """

    def __init__(self, connect: Callable[[], Any], turn: Callable[[], AbstractContextManager[None]]) -> None:
        self._connect, self._turn = connect, turn
        self._written = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self.num_failures = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; what is left in the log is read from there at the next start."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def note_written(self) -> None:
        """A transaction was committed."""
        self._written.set()

    def _work(self) -> None:
        connection: Any = None
        while not self._stopping.wait(_EVERY_S):
            if not self._written.is_set():
                continue
            self._written.clear()
            try:
                if connection is None:
                    connection = self._connect()
                self._checkpoint(connection)
            except Exception:
                if self.num_failures == 0:
                    logger.warning("the write-ahead log could not be moved; this goes on", exc_info=True)
                self.num_failures += 1
        if connection is not None:
            connection.close()

    def _checkpoint(self, connection: Any) -> None:
        _, num_pages, num_moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if num_moved == num_pages >= _RESTART_PAGES:
            with self._turn():
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
