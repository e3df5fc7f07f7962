"""What REST changes about runs: edits and deletions, and who has to be told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from gradiometer_server.clock import Clock
from gradiometer_server.domain.live import LiveUpdate, RunUpdate
from gradiometer_server.store import deletion, edits
from gradiometer_server.store.database import Database

logger = logging.getLogger(__name__)

FORGET_S: Final = 10.0
"""How long a deletion waits for the fold to let go; the last batch of the purge removes what it wrote after that."""


class RunChanges:
    """Changes runs of an open database. Thread-safe; every method blocks.

    Args:
        database: asked for with each change; raises `StoreUnavailable` before the start is done.
        forget: drops what the fold holds of a run, for at most so many seconds.
        deleted: told the storage key of each deleted run, once it is out of sight.
        publish: to the live feed.
        purge: told that there is something to purge; must not block.
    """

    def __init__(
        self,
        *,
        database: Callable[[], Database],
        clock: Clock,
        forget: Callable[[int, float], bool],
        deleted: Callable[[int], None],
        publish: Callable[[Sequence[LiveUpdate]], None],
        purge: Callable[[], None],
    ) -> None:
        self._database, self._clock = database, clock
        self._forget, self._deleted, self._publish, self._purge = forget, deleted, publish, purge

    def edit(self, run_id: str, edit: edits.RunEdit) -> None:
        """Change the description of a run. Raises `NotFound`, `InvalidRequest`, `StoreUnavailable`."""
        with self._database().write() as conn:
            edits.edit_run(conn, run_id, edit, self._clock.now_s())
        self._publish([RunUpdate(run_id=run_id)])

    def delete(self, run_id: str, *, force: bool) -> float:
        """Delete a run; when, in Unix seconds. Raises `NotFound`, `Conflict`, `StoreUnavailable`."""
        now_s = self._clock.now_s()
        with self._database().write() as conn:
            run_key = deletion.begin_delete(conn, run_id, now_s, force=force)
        self._deleted(run_key)
        if not self._forget(run_key, FORGET_S):
            logger.warning("run %s is deleted, but the fold has not let go of it yet", run_id)
        logger.info("run %s is deleted; its data is being removed", run_id)
        self._publish([RunUpdate(run_id=run_id)])
        self._purge()
        return now_s
