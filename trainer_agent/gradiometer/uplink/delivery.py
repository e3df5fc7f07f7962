"""Keeps one conversation with the server going: connects, sends what the session allows, reconnects with back-off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

from gradiometer import wire
from gradiometer.spool import SpoolError
from gradiometer.uplink.backoff import Backoff
from gradiometer.uplink.session import (
    Acknowledged,
    Commanded,
    Effect,
    Refused,
    RetryLater,
    Rewound,
    Session,
    Stopped,
)
from gradiometer.uplink.source import Source
from gradiometer.uplink.transport import TransportError, WebSocketLink, post

logger = logging.getLogger(__name__)

_WELCOME_TIMEOUT_S: Final = 15.0
_REFUSALS_BEFORE_POST: Final = 3
_LONGEST_POST_PAUSE_S: Final = 2.0


class Stop(Exception):
    """The server's answer makes it useless to go on without a change."""


class Delivery:
    """Talks to one server about the sources it is given; `run` returns only by raising `Stop`.

    Args:
        sources: by rank; owned by the caller, read here.
        progressed: called with a rank and how many more of its records are durable.

    Attributes:
        more: set it when there may be something new to send. It never shortens a back-off.
    """

    def __init__(
        self,
        *,
        url: str,
        token: str | None,
        agent_version: str,
        backoff: Backoff,
        sources: dict[int, Source],
        progressed: Callable[[int, int], None],
    ) -> None:
        self._url, self._token, self._agent_version = url, token, agent_version
        self._backoff = backoff
        self._sources = sources
        self._progressed = progressed
        self._session: Session | None = None
        self._num_refusals = 0
        self._heartbeat_due_s = 0.0
        self._welcome_timeout_s = _WELCOME_TIMEOUT_S
        self.more = asyncio.Event()
        self.state = "connecting"
        self.last_error = ""
        self.stopped = False

    @property
    def transport(self) -> str:
        """`websocket`, or `post` after the server has refused WebSockets several times in a row."""
        return "post" if self._num_refusals >= _REFUSALS_BEFORE_POST else "websocket"

    def add_source(self, run: wire.RunInfo, source: Source) -> None:
        """Begin to deliver a source."""
        if self._session is None:
            self._session = Session(run=run, agent_version=self._agent_version)
        self._session.add_source(source.info)
        self.more.set()

    def remove_source(self, rank: int) -> None:
        """Its folder is gone."""
        if self._session is not None:
            self._session.remove_source(rank)

    async def run(self) -> None:
        """Deliver for ever; raises `Stop`."""
        while True:
            while self._session is None or not self._sources:
                await self.more.wait()
                self.more.clear()
            try:
                await self._converse(self._session)
            except Stop as stop:
                self._note("stopped", str(stop))
                self.stopped = True
                raise
            except (TransportError, SpoolError) as error:
                self._note("waiting", str(error))
                refused = isinstance(error, TransportError) and error.refused
                # Refused by POST as well: look at the WebSocket again.
                self._num_refusals = (self._num_refusals + 1) % (_REFUSALS_BEFORE_POST + 1) if refused else 0
            finally:
                self._session.disconnect()
            await asyncio.sleep(self._backoff.next_s())

    def _note(self, state: str, error: str) -> None:
        if error != self.last_error:
            logger.warning("%s", error)
        self.state, self.last_error = state, error

    async def _converse(self, session: Session) -> None:
        if self.transport == "post":
            await self._converse_by_post(session)
            return
        link = await WebSocketLink.open(self._url, self._token)
        receive = asyncio.create_task(self._receive(session, link), name="receive")
        send = asyncio.create_task(self._send(session, link), name="send")
        try:
            done, _ = await asyncio.wait((receive, send), return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: task is send):
                # The receiver first: what the server said explains why sending failed.
                task.result()
        finally:
            for task in (receive, send):
                task.cancel()
            await asyncio.gather(receive, send, return_exceptions=True)
            await link.close()

    async def _receive(self, session: Session, link: WebSocketLink) -> None:
        async for message in link.messages():
            self._take(session, message)

    def _take(self, session: Session, message: wire.ServerMessage) -> None:
        for effect in session.receive(message):
            self._apply(effect)
        if session.welcomed and self.state != "connected":
            logger.info("connected to %s by %s", self._url, self.transport)
            self._backoff.reset()
            self.state, self.last_error = "connected", ""
            if self.transport == "websocket":
                self._num_refusals = 0
        self.more.set()

    def _apply(self, effect: Effect) -> None:
        match effect:
            case Acknowledged():
                self._acknowledged(effect)
            case Refused():
                self._refused(effect)
            case Rewound():
                logger.warning(
                    "rank %d: the server asks again from record %d: %s",
                    effect.rank,
                    effect.seq,
                    effect.message,
                )
            case Commanded(command=command):
                self._hand_over(command)
            case RetryLater(problem=problem):
                raise TransportError(_told(self._url, problem))
            case Stopped(problem=problem):
                raise Stop(_told(self._url, problem))

    def _acknowledged(self, effect: Acknowledged) -> None:
        source = self._sources.get(effect.rank)
        if source is not None and source.acked_seq != effect.seq:
            num_records = max(0, effect.seq - source.acked_seq)
            source.acknowledge(effect.seq)
            self._progressed(effect.rank, num_records)

    def _refused(self, effect: Refused) -> None:
        self._sources[effect.rank].num_rejected += len(effect.rejections)
        for rejection in effect.rejections:
            logger.error(
                "rank %d, record %d was refused: %s (%s)",
                effect.rank,
                rejection.seq,
                rejection.message,
                rejection.code,
            )

    def _hand_over(self, command: wire.Command) -> None:
        for source in self._sources.values():
            try:
                if source.outbox.put(command):
                    logger.info("rank %d: asked for %s: %s", source.rank, command.kind, command.reason)
            except OSError as error:
                logger.warning("rank %d: the command %s was lost: %s", source.rank, command.id, error)

    # Hot path: from the trainer's wake-up to the socket. No file but the spool is touched here.
    async def _send(self, session: Session, link: WebSocketLink) -> None:
        await link.send(session.connect())
        asked_s = time.monotonic()
        self._heartbeat_due_s = 0.0
        while True:
            self.more.clear()
            if (hello := session.hello()) is not None:
                await link.send(hello)
            while (message := self._next_records(session)) is not None:
                await link.send(message)
            now_s = time.monotonic()
            if session.welcomed and now_s >= self._heartbeat_due_s:
                self._heartbeat_due_s = now_s + session.heartbeat_s
                await link.send(self._status())
            if not session.welcomed and now_s - asked_s > self._welcome_timeout_s:
                raise TransportError(
                    f"{self._url} accepted the connection but does not answer; trying again."
                )
            await wait_briefly(
                self.more, max(0.01, self._heartbeat_due_s - now_s) if session.welcomed else 1.0
            )

    def _next_records(self, session: Session) -> wire.Records | None:
        """The next message of records, from the source that is furthest behind in turn; None if nothing may go now."""
        for rank in list(self._sources):
            request = session.request(rank)
            if request is None:
                continue
            records = self._sources[rank].read(request)
            if records and session.may_send(sum(map(len, records))):
                # To the back of the queue: no rank starves another.
                self._sources[rank] = self._sources.pop(rank)
                return session.sent(rank, request.first_seq, records)
        return None

    def _status(self) -> wire.Status:
        return wire.Status(
            sources=tuple(source.status() for source in self._sources.values() if not source.closed)
        )

    async def _converse_by_post(self, session: Session) -> None:
        while True:
            self.more.clear()
            hello = session.connect(keep_welcome=True)
            records = []
            while (message := self._next_records(session)) is not None:
                records.append(message)
            batch = wire.Batch(hello=hello, records=tuple(records), status=self._status())
            self._take(session, await post(self._url, self._token, batch))
            if not records:
                self.more.clear()
                await wait_briefly(self.more, min(session.heartbeat_s, _LONGEST_POST_PAUSE_S))


async def wait_briefly(event: asyncio.Event, timeout_s: float) -> None:
    """Return when `event` is set, or after `timeout_s` seconds.

    Not `asyncio.wait_for`: before Python 3.12 that loses a cancellation which arrives together with the event, and
    an uplink that had delivered everything would then never end.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def _told(url: str, problem: wire.Problem) -> str:
    return f"{url} says: {problem.message} ({problem.code}). {problem.remedy}".strip()
