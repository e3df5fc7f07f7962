"""A session together with the store: hello, records and status of one connection or one POST.

The event loop never waits for the database: what blocks runs in a thread, what is committed is awaited.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

import anyio.to_thread

from gradiometer import wire
from gradiometer_server.domain.live import RunUpdate
from gradiometer_server.domain.names import run_key
from gradiometer_server.errors import ProtocolError, StoreUnavailable
from gradiometer_server.fold.batch import Batch
from gradiometer_server.ingest.checks import KnownSchema, known_schema, status_fault
from gradiometer_server.ingest.services import IngestServices
from gradiometer_server.ingest.session import Accepted, Session, SourceName, problem_of
from gradiometer_server.ingest.tally import REPEATED
from gradiometer_server.store import log, runs
from gradiometer_server.store.deletion import deleted_error, refuse_deleted
from gradiometer_server.store.log import Busy

T = TypeVar("T")

logger = logging.getLogger(__name__)

HEARTBEAT_EVERY_S: Final = 3.0
_BUSY_WAIT_S: Final = 0.02

_writers = anyio.CapacityLimiter(4)
"""Threads for hellos and counters. Commits of records have a thread of their own, in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """Accepted records on their way to the disk."""

    accepted: Accepted
    source_id: int
    committed: Future[None]


class Conversation:
    """Answers one agent. One task uses it at a time."""

    def __init__(self, services: IngestServices) -> None:
        self._services = services
        self._session = Session()
        self._run_key = 0
        self._source_ids: dict[SourceName, int] = {}
        self._heartbeat_due_s = 0.0
        self._times_deleted = 0

    async def hello(self, hello: wire.Hello) -> wire.Welcome:
        """Register run and sources, and tell where to go on.

        Raises:
            ProtocolError: the hello cannot be used; fatal.
            StoreUnavailable: try again later.
        """
        hello = self._session.hello(hello)
        self._run_key = run_key(hello.run.run_id)
        self._times_deleted = self._services.deleted.times(self._run_key)
        for source, row, schemas in await _in_thread(lambda: self._register(hello)):
            self._source_ids[source] = row.source_id
            self._session.resume(source, acked_seq=row.acked_seq, schemas=schemas)
        self._services.publish([RunUpdate(run_id=hello.run.run_id)])
        return self._session.welcome(
            server_version=self._services.server_version, window_bytes=self._services.room.window_bytes()
        )

    def _register(self, hello: wire.Hello) -> list[tuple[SourceName, runs.SourceRow, dict[int, KnownSchema]]]:
        now_s = self._services.clock.now_s()
        found = []
        with self._services.database.write() as conn:
            refuse_deleted(conn, hello.run.run_id, [source.attempt for source in hello.sources])
            runs.ensure_run(conn, hello.run, now_s)
            for info in hello.sources:
                row = runs.ensure_source(conn, self._run_key, info, now_s)
                records = log.read_schemas(conn, self._run_key, row.source_id)
                found.append(((info.rank, info.attempt), row, _known_schemas(records)))
        return found

    async def records(self, messages: Sequence[wire.Records]) -> list[wire.ServerMessage]:
        """Make records durable, hand them to the fold, and answer each message, in order.

        Everything is given to the log before the first commit is awaited, so that one commit takes all.

        Raises:
            ProtocolError: the run was deleted; fatal.
        """
        self._check_is_there()
        answers: list[wire.ServerMessage] = []
        pending: list[_Pending] = []
        failed: set[SourceName] = set()
        for message in messages:
            source = (message.rank, message.attempt)
            if source in failed:
                continue
            try:
                pending.append(await self._submit(message))
            except ProtocolError as error:
                answers.append(await self._refused(error, source))
                # What follows in the same breath was sent before the agent could know.
                failed.add(source)
        failed.clear()
        for one in pending:
            answers.append(await self._settle(one, failed))
        for source in failed:
            await self._resume(source)
        return answers

    def _check_is_there(self) -> None:
        # A later launch may have begun the run anew: what this connection knows of its sources is another run's.
        if self._services.deleted.times(self._run_key) != self._times_deleted:
            raise deleted_error(self._session.run_id or "")

    async def _submit(self, message: wire.Records) -> _Pending:
        """Check a message and queue it; waits while the log is full, which stops the reading from this agent."""
        accepted = self._session.records(message)
        self._services.tally.add(REPEATED, accepted.num_repeated)
        for rejection in accepted.rejected:
            self._services.tally.add(rejection.code)
        source_id = self._source_ids[accepted.rank, accepted.attempt]
        rows = [(seq, data) for seq, data, _ in accepted.entries]
        while True:
            try:
                committed = self._services.log.submit(
                    self._run_key, source_id, accepted.first_seq, rows, accepted.last_seq
                )
            except Busy:
                await asyncio.sleep(_BUSY_WAIT_S)
            except StoreUnavailable as error:
                committed = Future()
                committed.set_exception(error)
                return _Pending(accepted=accepted, source_id=source_id, committed=committed)
            else:
                return _Pending(accepted=accepted, source_id=source_id, committed=committed)

    async def _settle(self, one: _Pending, failed: set[SourceName]) -> wire.ServerMessage:
        """Wait for the commit, then hand over and acknowledge; on failure nothing is acknowledged."""
        accepted = one.accepted
        source = (accepted.rank, accepted.attempt)
        try:
            await _resolved(one.committed)
            # Before anything else that can fail: what is committed is not sent again, so nobody else would fold it.
            self._hand_over(one)
            if accepted.rejected:
                await self._count_rejected([rejection.message for rejection in accepted.rejected])
        except StoreUnavailable as error:
            failed.add(source)
            return unavailable_problem(error, source)
        while not self._services.pipeline.has_room(self._run_key):  # noqa: ASYNC110 - the fold is no coroutine
            await asyncio.sleep(_BUSY_WAIT_S)
        return accepted.ack()

    def _hand_over(self, one: _Pending) -> None:
        accepted = one.accepted
        if accepted.last_seq < accepted.first_seq:
            return
        batch = Batch(
            run_key=self._run_key,
            source_id=one.source_id,
            first_seq=accepted.first_seq,
            last_seq=accepted.last_seq,
            entries=tuple((seq, record) for seq, _, record in accepted.entries),
            num_bytes=accepted.num_bytes,
        )
        self._services.pipeline.submit(batch)

    async def _resume(self, source: SourceName) -> None:
        """After a failed commit, expect what the store expects; if it does not even say, the next records fail too.

        Raises:
            ProtocolError: the run was deleted; fatal.
        """
        source_id = self._source_ids[source]
        try:
            acked_seq, schemas = await _in_thread(lambda: self._read_source(source_id))
        except StoreUnavailable:
            logger.warning("run %s, rank %d: waiting for the store", self._session.run_id, source[0])
            self._session.forget(source)
        else:
            self._session.resume(source, acked_seq=acked_seq, schemas=schemas)

    def _read_source(self, source_id: int) -> tuple[int, dict[int, KnownSchema]]:
        with self._services.database.read() as conn:
            rows = runs.list_sources(conn, self._run_key)
            acked_seq = next((row.acked_seq for row in rows if row.source_id == source_id), None)
            if acked_seq is None:
                raise deleted_error(self._session.run_id or "")
            return acked_seq, _known_schemas(log.read_schemas(conn, self._run_key, source_id))

    async def status(self, status: wire.Status) -> None:
        """Note the agents' sign of life, every few seconds at most.

        A status has no answer, and its records must not wait for it: a figure that cannot be right is counted as
        refused, and the sign of life is noted all the same.

        Raises:
            ProtocolError: no hello came before, or the run was deleted.
            StoreUnavailable: not noted.
        """
        if self._session.run_id is None:
            raise ProtocolError(
                "a status came before a hello", code="hello_expected", remedy="send a hello first", fatal=True
            )
        self._check_is_there()
        now_s = self._services.clock.monotonic_s()
        if now_s < self._heartbeat_due_s or not any(source.alive for source in status.sources):
            return
        self._heartbeat_due_s = now_s + HEARTBEAT_EVERY_S
        fault = status_fault(status)
        if fault is not None:
            await self._count_rejected([f"{fault.message}. {fault.remedy}."])
        await _in_thread(lambda: self._heartbeat({} if fault is not None else self._dropped(status)))

    def _dropped(self, status: wire.Status) -> dict[int, int]:
        return {
            self._source_ids[source.rank, source.attempt]: source.dropped_reports
            for source in status.sources
            if (source.rank, source.attempt) in self._source_ids and source.dropped_reports > 0
        }

    def _heartbeat(self, dropped: dict[int, int]) -> None:
        with self._services.database.write() as conn:
            runs.heartbeat(conn, self._run_key, self._services.clock.now_s(), dropped=dropped)

    async def refuse(self, reason: str) -> None:
        """Count a message that could not even be read; nothing to count on before a hello."""
        if self._session.run_id is not None:
            await self._count_rejected([reason])

    async def _count_rejected(self, reasons: Sequence[str]) -> None:
        await _in_thread(lambda: self._write_rejected(reasons))
        self._services.publish([RunUpdate(run_id=self._session.run_id or "")])

    def _write_rejected(self, reasons: Sequence[str]) -> None:
        with self._services.database.write() as conn:
            runs.count_rejected(conn, self._run_key, len(reasons), reasons[-1])

    async def _refused(self, error: ProtocolError, source: SourceName) -> wire.Problem:
        """Count and log a message out of sequence, and tell the agent where to go on."""
        problem = problem_of(error, source=source, expected_seq=self._session.expected_seq(source))
        logger.warning("an agent's records were refused (%s): %s", error.code, error.message)
        self._services.tally.add(error.code)
        try:
            await self.refuse(f"{error.message}. {error.remedy}.")
        except StoreUnavailable:
            logger.warning("a refused message was not counted on its run: the store is not available")
        return problem


def _known_schemas(records: Sequence[tuple[int, bytes]]) -> dict[int, KnownSchema]:
    decoded = (wire.decode_record(data) for _, data in records)
    known = [known_schema(one) for one in decoded if isinstance(one, (wire.ScalarSchema, wire.LayerSchema))]
    return {schema.schema_id: schema for schema in known}


def unavailable_problem(error: StoreUnavailable, source: SourceName | None = None) -> wire.Problem:
    """Nothing was acknowledged; without an expected number, the agent waits before it tries again."""
    rank, attempt = source if source is not None else (None, None)
    return wire.Problem(
        code=StoreUnavailable.code, message=error.message, remedy=error.remedy, rank=rank, attempt=attempt
    )


async def _resolved(future: Future[None]) -> None:
    """Wait for a future of the log, which as a rule resolves on this event loop's own thread: nobody is woken then."""
    loop, me = asyncio.get_running_loop(), threading.get_ident()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def on_done(_: Future[None]) -> None:
        if threading.get_ident() == me:
            wake()
        else:
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(on_done)
    await waiter
    future.result()


async def _in_thread(work: Callable[[], T]) -> T:
    return await anyio.to_thread.run_sync(work, limiter=_writers)
