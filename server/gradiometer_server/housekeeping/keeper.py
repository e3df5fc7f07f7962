"""The thread that keeps house: purges deleted runs, applies retention, gives freed space back.

Everything is done in transactions of some milliseconds with a pause of the same length after each, so that agents and
readers hardly notice. What fails is logged, counted and tried again; what a stop cuts short goes on at the next start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gradiometer_server.clock import Clock
from gradiometer_server.errors import Conflict, GradiometerError, NotFound
from gradiometer_server.housekeeping.policy import Due, due_by_age, due_by_size
from gradiometer_server.settings import Retention
from gradiometer_server.store import deletion, space, thinning
from gradiometer_server.store.database import Database

logger = logging.getLogger(__name__)

_RETRY_S: Final = 30.0
_LONGEST_PAUSE_S: Final = 0.25


@dataclass(slots=True, kw_only=True)
class Figures:
    """What was done since the server started.

    Attributes:
        last_pass_s: when retention was last applied, in Unix seconds.
        details_dropped, runs_thinned, runs_deleted, runs_purged: runs.
        freed_bytes: of points, details and log, as they were stored; released_bytes: given back to the disk (SQLite).
        failures: passes that were cut short; last_failure: in words.
    """

    last_pass_s: float | None = None
    details_dropped: int = 0
    runs_thinned: int = 0
    runs_deleted: int = 0
    runs_purged: int = 0
    freed_bytes: int = 0
    released_bytes: int = 0
    failures: int = 0
    last_failure: str | None = None


class Keeper:
    """Keeps house in a thread of its own.

    Args:
        delete: deletes a run by its public id, as a person would.
    """

    def __init__(
        self, database: Database, *, retention: Retention, clock: Clock, delete: Callable[[str], object]
    ) -> None:
        self._database, self.retention, self._clock, self._delete = database, retention, clock, delete
        self.figures = Figures()
        self._since_s = clock.now_s()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="housekeeping", daemon=True)

    def start(self) -> None:
        """Start the thread; it first purges what an earlier process left."""
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """End after the transaction under way, for at most so many seconds."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(deadline_s)

    def purge_soon(self) -> None:
        """There is a deleted run to purge. Any thread; returns at once."""
        self._wake.set()

    def _work(self) -> None:
        next_pass_s = self._clock.monotonic_s()
        while not self._stopping.is_set():
            self._wake.clear()
            due = self._clock.monotonic_s() >= next_pass_s
            done = self._guarded(due)
            now_s = self._clock.monotonic_s()
            if due:
                next_pass_s = now_s + (self.retention.interval_s if done else _RETRY_S)
            self._wake.wait(max(0.0, next_pass_s - now_s) if done else _RETRY_S)

    def _guarded(self, with_retention: bool) -> bool:
        try:
            self._purge()
            if with_retention:
                self._retain()
                self._purge()
            self._release()
        except Exception as error:
            self.figures.failures += 1
            self.figures.last_failure = str(error)
            known = isinstance(error, GradiometerError)
            logger.error(
                "housekeeping goes on in %d s: %s", _RETRY_S, error, exc_info=None if known else error
            )
            return False
        return True

    def _purge(self) -> None:
        with self._database.read() as conn:
            waiting = deletion.pending(conn)
        for one in waiting:
            while not self._stopping.is_set():
                begun_s = time.perf_counter()
                if not deletion.purge_batch(self._database, one.run_key):
                    self.figures.runs_purged += 1
                    logger.info("nothing is left of the deleted run %s", one.run_id)
                    break
                self._pause(begun_s)

    def _retain(self) -> None:
        retention, now_s = self.retention, self._clock.now_s()
        if retention.applies_by_age:
            runs = list(space.list_space(self._database, with_bytes=False))
            for due in due_by_age(runs, retention, now_s):
                self._apply(due)
        if retention.max_bytes is not None and space.used_bytes(self._database) > retention.max_bytes:
            runs = list(space.list_space(self._database, with_bytes=True))
            # PostgreSQL's files do not shrink by deleting: going by them, every pass would give up more.
            used_bytes = (
                space.used_bytes(self._database)
                if self._database.is_sqlite
                else sum(run.num_bytes for run in runs)
            )
            for due in due_by_size(self._quiet(runs, now_s), retention, used_bytes):
                self._apply(due)
        self.figures.last_pass_s = now_s

    def _quiet(self, runs: list[space.RunSpace], now_s: float) -> list[space.RunSpace]:
        # A run that cannot lose anything now must not be counted on to make room.
        with self._database.read() as conn:
            return [run for run in runs if thinning.is_quiet(conn, run.run_key, now_s, self._since_s)]

    def _apply(self, due: Due) -> None:
        if self._stopping.is_set():
            return
        if due.loss == "delete":
            self._delete_run(due)
            return
        freed_bytes = self._drop_details(due) if due.loss == "detail" else self._thin(due)
        if freed_bytes:
            what = "details of single ranks" if due.loss == "detail" else "raw points"
            logger.info("run %s lost its %s, %d bytes: %s", due.run.run_id, what, freed_bytes, due.reason)
            self.figures.freed_bytes += freed_bytes
            self.figures.details_dropped += due.loss == "detail"
            self.figures.runs_thinned += due.loss == "thin"

    def _delete_run(self, due: Due) -> None:
        with self._database.read() as conn:
            if not thinning.is_quiet(conn, due.run.run_key, self._clock.now_s(), self._since_s):
                return
        try:
            self._delete(due.run.run_id)
        except (NotFound, Conflict):
            # Somebody else deleted it, or it has just come back.
            return
        logger.info("run %s was deleted: %s", due.run.run_id, due.reason)
        self.figures.runs_deleted += 1
        self.figures.freed_bytes += due.run.num_bytes

    def _drop_details(self, due: Due) -> int:
        total = 0
        while not self._stopping.is_set():
            begun_s = time.perf_counter()
            freed = thinning.drop_details_batch(
                self._database, due.run.run_key, self._clock.now_s(), self._since_s
            )
            if freed is None:
                break
            total += freed
            self._pause(begun_s)
        return total

    def _thin(self, due: Due) -> int:
        total, place = 0, (-1, -1)
        while not self._stopping.is_set():
            begun_s = time.perf_counter()
            now_s = self._clock.now_s()
            after, freed = thinning.thin_batch(self._database, due.run.run_key, place, now_s, self._since_s)
            total += freed
            if after is None:
                break
            place = after
            self._pause(begun_s)
        return total

    def _release(self) -> None:
        released = 0
        while not self._stopping.is_set():
            begun_s = time.perf_counter()
            freed = space.release_batch(self._database)
            if not freed:
                break
            released += freed
            self._pause(begun_s)
        if released:
            logger.info("%d bytes were given back to the disk", released)
            self.figures.released_bytes += released

    def _pause(self, begun_s: float) -> None:
        self._stopping.wait(min(_LONGEST_PAUSE_S, time.perf_counter() - begun_s))
