"""Threads that fold: a run is always on the same one, so it has one owner and its records keep their order.

Bounded by bytes: when folding falls behind, `has_room` says no and ingest waits before it acknowledges. A batch is
in the log before it comes here; if anything fails, the owner is dropped and later loaded from the log again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Final

from gradiometer_server.clock import Clock
from gradiometer_server.domain.series import Tail
from gradiometer_server.errors import GradiometerError, NotFound
from gradiometer_server.fold.batch import Batch
from gradiometer_server.fold.owner import Publish, RunOwner
from gradiometer_server.store import log
from gradiometer_server.store.database import Database

logger = logging.getLogger(__name__)

DEFAULT_WORKERS: Final = 2
DEFAULT_QUEUE_BYTES: Final = 64 * 1024 * 1024
_BATCH_OVERHEAD_BYTES: Final = 1024
_TICK_S: Final = 0.5
_FIRST_RETRY_S: Final = 0.5
_LAST_RETRY_S: Final = 30.0


class FoldPipeline:
    """Hands batches to workers. All methods are thread-safe."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock,
        publish: Publish,
        num_workers: int = DEFAULT_WORKERS,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
    ) -> None:
        self._database = database
        limit_bytes = queue_bytes // num_workers
        self._workers = [
            _Worker(database, clock=clock, publish=publish, limit_bytes=limit_bytes, number=number)
            for number in range(num_workers)
        ]

    def start(self) -> None:
        """Start the threads and fold what is left in the log, so that every tail is in memory. Blocks.

        Raises:
            StoreUnavailable: the log cannot be read. A run that cannot be loaded is logged and tried again later.
        """
        with self._database.read() as conn:
            unfolded = sorted({run_key for run_key, _ in log.sources_with_unfolded(conn)})
        for run_key in unfolded:
            self._worker(run_key).load_later(run_key)
        for worker in self._workers:
            worker.start()
        for worker in self._workers:
            worker.loaded.wait()

    def stop(self, deadline_s: float) -> None:
        """Fold what is queued and flush every run, for at most `deadline_s` seconds; the log keeps the rest."""
        for worker in self._workers:
            worker.ask_to_stop()
        for worker in self._workers:
            worker.join(deadline_s)

    def submit(self, batch: Batch) -> None:
        """Queue a committed batch; never blocks. Batches of one source must come in order."""
        self._worker(batch.run_key).put(batch)

    def has_room(self, run_key: int) -> bool:
        """Whether the worker of this run keeps up; while not, its agents' acks are held back."""
        return self._worker(run_key).has_room

    def forget(self, run_key: int, deadline_s: float) -> bool:
        """Drop what is in memory of a deleted run; False if its worker did not come to it in time. Blocks."""
        return self._worker(run_key).forget(run_key).wait(deadline_s)

    def tails(self, run_key: int) -> Mapping[int, Tail]:
        """Points of a run that are not in chunks yet, by series id. Take them before reading chunks, not after."""
        owner = self._worker(run_key).owner(run_key)
        return {} if owner is None else owner.tails()

    def latest(self, run_key: int, names: Collection[str] | None = None) -> Mapping[str, tuple[int, float]]:
        """(step, value) of the newest merged scalars (or of those) of a run that is in memory; empty for any other."""
        owner = self._worker(run_key).owner(run_key)
        return {} if owner is None else owner.latest(names)

    def last_step(self, run_key: int) -> int | None:
        """Highest step of the merged scalars of a run that is in memory; None for any other."""
        owner = self._worker(run_key).owner(run_key)
        return None if owner is None else owner.last_step

    def _worker(self, run_key: int) -> _Worker:
        return self._workers[run_key % len(self._workers)]


class _Retry:
    """When to load a run again, further apart with each failure."""

    def __init__(self, now_s: float) -> None:
        self.wait_s, self.due_s = _FIRST_RETRY_S, now_s

    def failed(self, now_s: float) -> None:
        self.due_s = now_s + self.wait_s
        self.wait_s = min(2 * self.wait_s, _LAST_RETRY_S)


class _Worker:
    """One thread and the owners of its runs."""

    def __init__(
        self, database: Database, *, clock: Clock, publish: Publish, limit_bytes: int, number: int
    ) -> None:
        self._database, self._clock, self._publish = database, clock, publish
        self._limit_bytes = limit_bytes
        self._queue: deque[Batch] = deque()
        self._queued_bytes = 0
        self._owners: dict[int, RunOwner] = {}
        self._to_load: dict[int, _Retry] = {}
        self._to_forget: list[tuple[int, threading.Event]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._next_tick_s = 0.0
        self.loaded = threading.Event()
        self.num_failures = 0
        self._thread = threading.Thread(target=self._work, name=f"fold-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load_later(self, run_key: int) -> None:
        """Have the thread load a run when it next has time."""
        self._to_load.setdefault(run_key, _Retry(self._clock.monotonic_s()))

    def put(self, batch: Batch) -> None:
        with self._changed:
            self._queue.append(batch)
            self._queued_bytes += batch.num_bytes + _BATCH_OVERHEAD_BYTES
            self._changed.notify()

    def forget(self, run_key: int) -> threading.Event:
        """Have the thread drop a run; the event says when it has."""
        done = threading.Event()
        with self._changed:
            self._to_forget.append((run_key, done))
            self._changed.notify()
        return done

    @property
    def has_room(self) -> bool:
        return self._queued_bytes < self._limit_bytes

    def owner(self, run_key: int) -> RunOwner | None:
        return self._owners.get(run_key)

    def ask_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, deadline_s: float) -> None:
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            logger.warning("the fold did not finish within %s s; the log keeps what is left", deadline_s)

    def _work(self) -> None:
        self._load_due()
        self.loaded.set()
        while True:
            batch = self._next()
            if batch is None and self._stopping:
                break
            self._forget_asked()
            if batch is not None:
                self._take(batch)
            self._tick_if_due()
        for run_key in list(self._owners):
            self._guarded(run_key, RunOwner.flush)

    def _next(self) -> Batch | None:
        with self._changed:
            if not self._queue and not self._stopping and not self._to_forget:
                self._changed.wait(_TICK_S)
            return self._queue.popleft() if self._queue else None

    def _forget_asked(self) -> None:
        with self._changed:
            asked, self._to_forget = self._to_forget, []
        for run_key, done in asked:
            self._owners.pop(run_key, None)
            self._to_load.pop(run_key, None)
            done.set()

    def _take(self, batch: Batch) -> None:
        try:
            if batch.run_key not in self._to_load:
                self._with_owner(batch)
        finally:
            with self._changed:
                self._queued_bytes -= batch.num_bytes + _BATCH_OVERHEAD_BYTES

    def _with_owner(self, batch: Batch) -> None:
        if batch.run_key not in self._owners:
            # Loading reads the log, which holds this batch already.
            self._load(batch.run_key)
            return
        self._guarded(batch.run_key, lambda owner: owner.take(batch))
        self._guarded(batch.run_key, _flush_if_due)

    def _load(self, run_key: int) -> None:
        retry = self._to_load.setdefault(run_key, _Retry(self._clock.monotonic_s()))
        try:
            self._owners[run_key] = RunOwner(
                database=self._database, clock=self._clock, run_key=run_key, publish=self._publish
            )
        except NotFound:
            # It was deleted, and what is still under way of it has nowhere to go.
            del self._to_load[run_key]
        except Exception as error:  # noqa: BLE001 - top of a worker loop: one run must not stop the others
            self._report(run_key, error)
            retry.failed(self._clock.monotonic_s())
        else:
            del self._to_load[run_key]

    def _guarded(self, run_key: int, action: Callable[[RunOwner], None]) -> None:
        """Let the owner act; if it cannot, drop it: the log and the store are whole, its memory may not be."""
        owner = self._owners.get(run_key)
        if owner is None:
            return
        try:
            action(owner)
        except Exception as error:  # noqa: BLE001 - top of a worker loop: one run must not stop the others
            self._report(run_key, error)
            del self._owners[run_key]
            self._to_load[run_key] = _Retry(self._clock.monotonic_s())
            self._to_load[run_key].failed(self._clock.monotonic_s())

    def _report(self, run_key: int, error: Exception) -> None:
        self.num_failures += 1
        if isinstance(error, GradiometerError):
            logger.error("run key %d is loaded again later: %s", run_key, error)
        else:
            logger.error("run key %d is loaded again later", run_key, exc_info=error)

    def _tick_if_due(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s < self._next_tick_s:
            return
        self._next_tick_s = now_s + _TICK_S
        self._load_due()
        for run_key in list(self._owners):
            self._guarded(run_key, RunOwner.tick)
            owner = self._owners.get(run_key)
            if owner is not None and owner.is_done_with():
                del self._owners[run_key]

    def _load_due(self) -> None:
        now_s = self._clock.monotonic_s()
        for run_key, retry in list(self._to_load.items()):
            if retry.due_s <= now_s:
                self._load(run_key)


def _flush_if_due(owner: RunOwner) -> None:
    if owner.flush_is_due():
        owner.flush()
