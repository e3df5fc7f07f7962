"""The durable log: one thread commits what all connections submit, together, and then answers all of them.

An ack may be sent when the future resolves: the records are then on disk. A record is written once: those at or
below the source's `acked_seq` are dropped as resends, which also holds when their frames are folded away already.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import msgspec
from sqlalchemy import Connection, bindparam, func, select, tuple_, update

from gradiometer_server.errors import StoreUnavailable
from gradiometer_server.store.database import Database
from gradiometer_server.store.statements import insert_or_ignore
from gradiometer_server.store.tables import frame, source, source_schema

logger = logging.getLogger(__name__)

DEFAULT_QUEUE_BYTES: Final = 64 * 1024 * 1024
_GROUP_BYTES: Final = 16 * 1024 * 1024
"""Most bytes in one transaction, so that a flood does not make the first in line wait for all."""
_RECORD_OVERHEAD_BYTES: Final = 200
_READ_ROWS: Final = 4096

Place = tuple[int, int]
"""(run key, source id)."""


class Busy(StoreUnavailable):
    """The log's queue is full: stop reading from the agent until `submit` succeeds again."""

    code = "busy"


class _Kind(msgspec.Struct):
    type: str = ""


_kind_decoder = msgspec.msgpack.Decoder(_Kind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Submission:
    place: Place
    first_seq: int
    last_seq: int
    records: Sequence[tuple[int, bytes]]
    size_bytes: int
    future: Future[None] = field(default_factory=Future)


_ACKED = (
    select(source.c.run_id, source.c.source_id, source.c.acked_seq)
    .where(tuple_(source.c.run_id, source.c.source_id).in_(bindparam("places", expanding=True)))
    .order_by(source.c.run_id, source.c.source_id)
    .with_for_update()
)
_ADVANCE = (
    update(source)
    .where(source.c.run_id == bindparam("of_run"), source.c.source_id == bindparam("of_source"))
    .values(acked_seq=bindparam("seq"))
)
_INSERT_FRAMES = insert_or_ignore(frame)
_INSERT_SCHEMAS = insert_or_ignore(source_schema)
_IN_SOURCE = (frame.c.run_id == bindparam("of_run"), frame.c.source_id == bindparam("of_source"))
_SIZES = (
    select(frame.c.seq, func.length(frame.c.data).label("size"))
    .where(*_IN_SOURCE, frame.c.seq > bindparam("after"))
    .order_by(frame.c.seq)
    .limit(_READ_ROWS)
)
_FRAMES = (
    select(frame.c.seq, frame.c.data)
    .where(*_IN_SOURCE, frame.c.seq > bindparam("after"), frame.c.seq <= bindparam("last"))
    .order_by(frame.c.seq)
)
_SCHEMAS = (
    select(source_schema.c.seq, source_schema.c.data)
    .where(source_schema.c.run_id == bindparam("of_run"), source_schema.c.source_id == bindparam("of_source"))
    .order_by(source_schema.c.seq)
)
_UNFOLDED = select(source.c.run_id, source.c.source_id).where(source.c.acked_seq > source.c.folded_seq)


class LogWriter:
    """Group commit of frames. `submit` from any thread or event loop.

    The futures resolve on the writer's thread, or all those of a commit at once through `call_soon`: an event loop that
    is woken once for each of a thousand futures is as slow as the commit.
    """

    def __init__(
        self,
        database: Database,
        *,
        queue_bytes: int = DEFAULT_QUEUE_BYTES,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self._database, self._limit_bytes = database, queue_bytes
        self._call_soon = call_soon
        self._queue: deque[_Submission] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="log-writer", daemon=True)
        self.num_commits = 0
        self.num_failures = 0

    @property
    def queued_bytes(self) -> int:
        """Bytes submitted and not yet committed."""
        return self._queued_bytes

    def start(self) -> None:
        """Start the writer's thread."""
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """Commit what is queued for at most `deadline_s` seconds; what is left then fails and is sent again."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
        if left or self._thread.is_alive():
            logger.warning(
                "the log was stopped after %s s with %d submissions uncommitted", deadline_s, len(left)
            )
        _fail(left, StoreUnavailable("the server stops.", remedy="The agent sends these records again."))

    def submit(
        self,
        run_key: int,
        source_id: int,
        first_seq: int,
        records: Sequence[tuple[int, bytes]],
        last_seq: int,
    ) -> Future[None]:
        """Queue the records first_seq..last_seq of a source; refused ones are simply missing from `records`.

        The future resolves after the commit, or fails with `StoreUnavailable`.

        Raises:
            Busy: too many bytes wait already.
            StoreUnavailable: the writer has been stopped.
        """
        size = sum(len(data) for _, data in records) + _RECORD_OVERHEAD_BYTES * (len(records) + 1)
        item = _Submission(
            place=(run_key, source_id),
            first_seq=first_seq,
            last_seq=last_seq,
            records=records,
            size_bytes=size,
        )
        with self._changed:
            if self._stopping:
                raise StoreUnavailable("the server stops.", remedy="The agent sends these records again.")
            # One submission always fits into an empty queue, however large.
            if self._queued_bytes and self._queued_bytes + size > self._limit_bytes:
                raise Busy(
                    f"{self._queued_bytes} bytes wait to be written.", remedy="Send again a little later."
                )
            self._queue.append(item)
            self._queued_bytes += size
            self._changed.notify_all()
        return item.future

    def _work(self) -> None:
        while (group := self._next_group()) is not None:
            try:
                gaps = self._commit(group)
                self.num_commits += 1
            except Exception as error:  # noqa: BLE001 - top of a worker loop: the log must outlive any one commit
                self._failed(group, error)
            else:
                self._settle(lambda group=group, gaps=gaps: _committed(group, gaps))  # type: ignore[misc]
            with self._changed:
                self._queued_bytes -= sum(item.size_bytes for item in group)
                self._changed.notify_all()

    def _settle(self, resolve: Callable[[], None]) -> None:
        if self._call_soon is not None:
            with contextlib.suppress(RuntimeError):  # The event loop has ended.
                self._call_soon(resolve)
                return
        resolve()

    def _next_group(self) -> list[_Submission] | None:
        group: list[_Submission] = []
        size = 0
        with self._changed:
            while not self._queue and not self._stopping:
                self._changed.wait()
            if not self._queue:
                return None
            while self._queue and (not group or size + self._queue[0].size_bytes <= _GROUP_BYTES):
                item = self._queue.popleft()
                size += item.size_bytes
                # A future that its owner cancelled is not written; once running it can no longer be cancelled.
                if item.future.set_running_or_notify_cancel():
                    group.append(item)
                else:
                    self._queued_bytes -= item.size_bytes
        return group

    def _commit(self, group: list[_Submission]) -> list[_Submission]:
        """Write the group in one transaction; returns the submissions that would have left a hole."""
        # Hot path: no decoding of frames, one statement per kind of row for the whole group.
        frames: list[dict[str, object]] = []
        gaps: list[_Submission] = []
        with self._database.write(urgent=True) as conn:
            places = sorted({item.place for item in group})
            acked = {(row[0], row[1]): row[2] for row in conn.execute(_ACKED, {"places": places})}
            before = dict(acked)
            for item in group:
                reached = acked.get(item.place)
                if reached is None or item.first_seq > reached + 1:
                    gaps.append(item)
                    continue
                frames.extend(_rows(item, reached))
                acked[item.place] = max(reached, item.last_seq)
            _insert(conn, frames)
            _advance(conn, {place: seq for place, seq in acked.items() if seq > before[place]})
        return gaps

    def _failed(self, group: list[_Submission], error: Exception) -> None:
        self.num_failures += 1
        if isinstance(error, StoreUnavailable):
            logger.error("%d batches were not written: %s", len(group), error)
            self._settle(lambda: _fail(group, error))
            return
        logger.exception("%d batches were not written", len(group))
        failure = StoreUnavailable(f"the log failed: {error}.", remedy="See the server's log.")
        self._settle(lambda: _fail(group, failure))


def _rows(item: _Submission, reached: int) -> Iterable[dict[str, object]]:
    key, source_id = item.place
    return (
        {"run_id": key, "source_id": source_id, "seq": seq, "data": data}
        for seq, data in item.records
        if seq > reached
    )


def _insert(conn: Connection, frames: list[dict[str, object]]) -> None:
    if not frames:
        return
    conn.execute(_INSERT_FRAMES.on(conn), frames)
    schemas = [row for row in frames if _is_schema(row["data"])]
    if schemas:
        conn.execute(_INSERT_SCHEMAS.on(conn), schemas)


def _advance(conn: Connection, moved: dict[Place, int]) -> None:
    if moved:
        rows = [
            {"of_run": key, "of_source": source_id, "seq": seq} for (key, source_id), seq in moved.items()
        ]
        conn.execute(_ADVANCE, rows)


def _is_schema(data: object) -> bool:
    # Only the tag is decoded. Records come from validated connections; one that is no message is no schema either.
    try:
        return isinstance(data, bytes) and _kind_decoder.decode(data).type in ("scalars", "layers")
    except msgspec.DecodeError:
        return False


def _gap_error() -> StoreUnavailable:
    return StoreUnavailable(
        "records before these were not written, because the source is unknown or its previous batch failed.",
        remedy="Send again from the first record that was not acknowledged.",
    )


def _committed(group: Sequence[_Submission], gaps: Sequence[_Submission]) -> None:
    _fail(gaps, _gap_error())
    for item in group:
        if not item.future.done():
            item.future.set_result(None)


def _fail(items: Iterable[_Submission], error: StoreUnavailable) -> None:
    for item in items:
        if not item.future.done():
            item.future.set_exception(error)


def read_frames(
    conn: Connection, run_key: int, source_id: int, after_seq: int, limit_bytes: int
) -> list[tuple[int, bytes]]:
    """Records of a source after `after_seq`, in order, up to about `limit_bytes` (at least one, if there is any)."""
    find = {"of_run": run_key, "of_source": source_id, "after": after_seq}
    total, last = 0, None
    for seq, size in conn.execute(_SIZES, find):
        if last is not None and total + size > limit_bytes:
            break
        total, last = total + size, seq
    if last is None:
        return []
    return [(row.seq, row.data) for row in conn.execute(_FRAMES, {**find, "last": last})]


def read_schemas(conn: Connection, run_key: int, source_id: int) -> list[tuple[int, bytes]]:
    """(seq, record) of every schema that a source has declared, acknowledged ones only, in order."""
    return [
        (row.seq, row.data) for row in conn.execute(_SCHEMAS, {"of_run": run_key, "of_source": source_id})
    ]


def sources_with_unfolded(conn: Connection) -> list[Place]:
    """(run key, source id) of every source whose log the fold has not taken in yet."""
    return [(row[0], row[1]) for row in conn.execute(_UNFOLDED)]
