"""`/api/v1/ingest`: agents over a WebSocket, or one POST at a time where WebSockets are blocked.

An ack goes out only after the commit. While the log or the fold is behind, nothing more is read, so the agent's own
window fills and its spool keeps the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fastapi import APIRouter, Request, Response, WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from gradiometer import wire
from gradiometer_server.errors import ProtocolError, StoreUnavailable
from gradiometer_server.ingest.commands import Courier
from gradiometer_server.ingest.conversation import Conversation, unavailable_problem
from gradiometer_server.ingest.inbox import Inbox
from gradiometer_server.ingest.room import WINDOW_BYTES
from gradiometer_server.ingest.services import IngestServices
from gradiometer_server.ingest.session import problem_of

logger = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/msgpack"

_POLICY, _INVALID, _TOO_BIG, _TRY_LATER = 1008, 1007, 1009, 1013
"""WebSocket close codes (RFC 6455, section 7.4.1)."""
_MAX_REASON_BYTES: Final = 120


def ingest_router(services: Callable[[], IngestServices]) -> APIRouter:
    """The routes. `services` is asked at each connection; it raises `StoreUnavailable` before the start is done."""
    router = APIRouter()

    @router.websocket("/ingest")
    async def ingest_socket(socket: WebSocket) -> None:
        if wire.SUBPROTOCOL not in socket.scope.get("subprotocols", ()):
            await _deny(socket, _wrong_subprotocol())
            return
        try:
            found = services()
        except StoreUnavailable as error:
            await _deny(socket, unavailable_problem(error), status=503)
            return
        await socket.accept(subprotocol=wire.SUBPROTOCOL)
        await _Connection(socket, found).run()

    @router.post("/ingest", summary="One round of an agent's conversation", response_class=Response)
    async def ingest_post(request: Request) -> Response:
        """Body: msgpack `Batch`; answer: msgpack `BatchResult`, or a `Problem` with a status of 400, 413 or 503."""
        try:
            found = services()
        except StoreUnavailable as error:
            return _packed(503, unavailable_problem(error))
        try:
            return _packed(200, await _answer_batch(found, await _read_body(request)))
        except ProtocolError as error:
            found.tally.add(error.code)
            return _packed(413 if error.code == "message_too_large" else 400, problem_of(error))
        except StoreUnavailable as error:
            return _packed(503, unavailable_problem(error))

    return router


def _packed(status: int, message: wire.ServerMessage) -> Response:
    headers = {"Retry-After": "2"} if status == 503 else None
    return Response(wire.encode(message), status_code=status, media_type=MEDIA_TYPE, headers=headers)


async def _deny(socket: WebSocket, problem: wire.Problem, *, status: int = 400) -> None:
    """Refuse the handshake with an HTTP answer that says why."""
    await socket.send_denial_response(_packed(status, problem))


def _wrong_subprotocol() -> wire.Problem:
    return wire.Problem(
        code="unknown_subprotocol",
        message=f"this socket speaks the subprotocol {wire.SUBPROTOCOL}, which the client did not offer",
        remedy="connect with an agent of this version; browsers use /api/v1/live",
        fatal=True,
    )


def _too_large(num_bytes: int) -> ProtocolError:
    return ProtocolError(
        f"a message of {num_bytes} bytes; at most {wire.MAX_MESSAGE_BYTES} are read",
        code="message_too_large",
        remedy="send fewer records at once",
        fatal=True,
    )


def _decode(data: bytes) -> wire.ClientMessage:
    try:
        return wire.decode_client_message(data)
    except wire.WireError as error:
        raise ProtocolError(
            str(error), code="malformed_message", remedy="upgrade the agent, or report this", fatal=True
        ) from error


async def _read_body(request: Request) -> bytes:
    """The body, read no further than a message may be long."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > wire.MAX_MESSAGE_BYTES:
            raise _too_large(int(request.headers.get("content-length", len(data))))
    return bytes(data)


async def _answer_batch(services: IngestServices, body: bytes) -> wire.BatchResult:
    conversation = Conversation(services)
    batch = _decode(body)
    if not isinstance(batch, wire.Batch):
        raise ProtocolError(
            f"a POST must carry a batch, not a {type(batch).__name__.lower()}",
            code="batch_expected",
            remedy="wrap hello, records and status in one batch",
            fatal=True,
        )
    welcome = await conversation.hello(batch.hello)
    answers = await conversation.records(batch.records)
    if batch.status is not None:
        await conversation.status(batch.status)
    services.commands.polled(batch.hello)
    return wire.BatchResult(
        welcome=welcome,
        acks=tuple(answer for answer in answers if isinstance(answer, wire.Ack)),
        problems=tuple(answer for answer in answers if isinstance(answer, wire.Problem)),
        commands=services.commands.recent(batch.hello.run.run_id, batch.hello.commands),
    )


class _Connection:
    """One WebSocket: a task that reads, one that works and answers, and one that carries commands."""

    def __init__(self, socket: WebSocket, services: IngestServices) -> None:
        self._socket = socket
        self._conversation = Conversation(services)
        self._tally = services.tally
        self._inbox = Inbox(limit_bytes=WINDOW_BYTES)
        self._room = services.room
        self._held_bytes = 0
        self._sending = asyncio.Lock()
        self._courier = Courier(services.commands, self._send)
        self._fault: ProtocolError | None = None

    async def run(self) -> None:
        """Serve until the agent goes, or until it makes a mistake that cannot be mended."""
        self._room.num_connections += 1
        reader = asyncio.create_task(self._read(), name="ingest-reader")
        try:
            while messages := await self._inbox.take():
                await self._work(messages)
                self._release(sum(map(len, messages)))
            await self._end_with(self._fault)
        except ProtocolError as error:
            await self._end_with(error)
        except (WebSocketDisconnect, RuntimeError) as error:
            # Starlette raises RuntimeError for a send after the peer has gone; everything committed stays.
            if self._socket.client_state is WebSocketState.CONNECTED and isinstance(error, RuntimeError):
                raise
        finally:
            await self._courier.close()
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            self._release(self._held_bytes)
            self._room.num_connections -= 1

    def _release(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes
        self._room.give_back(num_bytes)

    async def _read(self) -> None:
        """Fill the inbox. The first message that cannot be read ends the reading; what came before is worked on."""
        try:
            while True:
                event = await self._socket.receive()
                if event["type"] == "websocket.disconnect":
                    await self._left(event.get("code", 0))
                    return
                message = self._checked(event.get("bytes"))
                await self._room.take(len(message))
                self._held_bytes += len(message)
                await self._inbox.put(message)
        except ProtocolError as error:
            self._fault = error
        finally:
            await self._inbox.close()

    async def _left(self, code: int) -> None:
        if code == _TOO_BIG:
            # The protocol layer has refused an oversized message by itself and told the agent.
            await self._count(f"a message of more than {wire.MAX_MESSAGE_BYTES} bytes was refused")

    def _checked(self, data: bytes | None) -> bytes:
        if data is None:
            raise ProtocolError(
                "a text message came", code="malformed_message", remedy="send binary messages", fatal=True
            )
        if len(data) > wire.MAX_MESSAGE_BYTES:
            raise _too_large(len(data))
        return data

    async def _work(self, messages: Sequence[bytes]) -> None:
        """Answer messages in order; records that come in a row share one commit."""
        for group in _groups(messages):
            first = group[0]
            try:
                await self._answer(first, group)
            except StoreUnavailable as error:
                await self._send(unavailable_problem(error))

    async def _answer(self, first: wire.ClientMessage, group: Sequence[wire.ClientMessage]) -> None:
        if isinstance(first, wire.Hello):
            await self._send(await self._conversation.hello(first))
            self._courier.take_up(first)
        elif isinstance(first, wire.Status):
            await self._conversation.status(first)
        elif isinstance(first, wire.Records):
            records = [message for message in group if isinstance(message, wire.Records)]
            for answer in await self._conversation.records(records):
                await self._send(answer)
        else:
            raise ProtocolError(
                "a batch came over a WebSocket",
                code="malformed_message",
                remedy="send hello, records and status by themselves",
                fatal=True,
            )

    async def _send(self, message: wire.ServerMessage) -> None:
        async with self._sending:
            await self._socket.send_bytes(wire.encode(message))
        if isinstance(message, wire.Problem) and message.fatal:
            await self._close(message.code)

    async def _end_with(self, error: ProtocolError | None) -> None:
        """Tell the agent about a fatal mistake and close; without one it has left by itself."""
        if error is None:
            return
        logger.warning("an agent was refused (%s): %s", error.code, error.message)
        self._tally.add(error.code)
        await self._count(error.message)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await self._socket.send_bytes(wire.encode(problem_of(error)))
            await self._close(error.code)

    async def _close(self, code: str) -> None:
        codes = {"message_too_large": _TOO_BIG, "malformed_message": _INVALID}
        await self._socket.close(codes.get(code, _POLICY), code[:_MAX_REASON_BYTES])

    async def _count(self, reason: str) -> None:
        try:
            await self._conversation.refuse(reason)
        except StoreUnavailable as error:
            logger.warning("a refused message was not counted: %s", error)


def _groups(messages: Sequence[bytes]) -> Iterator[list[wire.ClientMessage]]:
    """Decoded messages, those of records that follow each other together; raises at a bad one, after the good ones."""
    group: list[wire.ClientMessage] = []
    fault: ProtocolError | None = None
    for data in messages:
        try:
            message = _decode(data)
        except ProtocolError as error:
            fault = error
            break
        if group and not (isinstance(message, wire.Records) and isinstance(group[0], wire.Records)):
            yield group
            group = []
        group.append(message)
    if group:
        yield group
    if fault is not None:
        raise fault
