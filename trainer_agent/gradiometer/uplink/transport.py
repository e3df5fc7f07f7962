"""Carries messages between the session and a server: one WebSocket, or one POST per batch where that is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from websockets import Subprotocol
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.version import version as websockets_version

from gradiometer import wire
from gradiometer.address import refuse_credentials, shown
from gradiometer.credentials import checked_token

INGEST_PATH: Final = "/api/v1/ingest"
_OPEN_TIMEOUT_S: Final = 10.0
_POST_TIMEOUT_S: Final = 30.0
_CLOSE_TIMEOUT_S: Final = 2.0
_PING_S: Final = 20.0
_MOST_BODY_BYTES: Final = wire.MAX_MESSAGE_BYTES
_BUSY_STATUSES: Final = (401, 403, 408, 429, 500, 503, 504)
"""Refusals that say nothing about WebSockets: POST would meet the same."""


class TransportError(Exception):
    """The server cannot be reached or does not answer as one; the text says what, where and what to do.

    Attributes:
        refused: the server answered, but not with a WebSocket: POST may work.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        self.refused = refused
        super().__init__(message)


def check_url(url: str) -> str:
    """The server's address without a trailing slash; raises `ValueError` that says what is wrong with it."""
    refuse_credentials(url)
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in ("http", "https", "ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        # Its text may quote what somebody meant as a password.
        valid = False
    if not valid:
        raise ValueError(
            f"GRADIOMETER_URL is {shown(url)!r}: it must look like http://127.0.0.1:7717 or https://host/path."
        )
    if parts.query or parts.fragment:
        raise ValueError(f"GRADIOMETER_URL is {shown(url)!r}: leave out everything from the ? or # on.")
    return url.rstrip("/")


def websocket_url(url: str) -> str:
    """Where agents connect: `http` becomes `ws`, a path prefix stays."""
    scheme, _, rest = check_url(url).partition("://")
    return f"{ {'http': 'ws', 'https': 'wss'}.get(scheme.lower(), scheme.lower()) }://{rest}{INGEST_PATH}"


def post_url(url: str) -> str:
    """Where batches are posted."""
    scheme, _, rest = check_url(url).partition("://")
    return f"{ {'ws': 'http', 'wss': 'https'}.get(scheme.lower(), scheme.lower()) }://{rest}{INGEST_PATH}"


class WebSocketLink:
    """One open WebSocket that speaks `wire`."""

    def __init__(self, connection: ClientConnection, url: str) -> None:
        self._connection, self._url = connection, url

    @classmethod
    async def open(cls, url: str, token: str | None) -> WebSocketLink:
        """Connect; raises `TransportError`."""
        address = websocket_url(url)
        options: dict[str, Any] = {}
        if _is_loopback(address) and int(websockets_version.partition(".")[0]) >= 15:
            # A proxy from the environment has no business between two programs on one machine.
            options["proxy"] = None
        try:
            connection = await connect(
                address,
                subprotocols=[Subprotocol(wire.SUBPROTOCOL)],
                additional_headers=_authorization(token),
                compression=None,
                max_size=wire.MAX_MESSAGE_BYTES,
                open_timeout=_OPEN_TIMEOUT_S,
                close_timeout=_CLOSE_TIMEOUT_S,
                ping_interval=_PING_S,
                ping_timeout=_PING_S,
                **options,
            )
        except InvalidStatus as error:
            status = error.response.status_code
            raise TransportError(_refusal(url, status), refused=status not in _BUSY_STATUSES) from error
        except (InvalidHandshake, InvalidURI) as error:
            raise TransportError(f"{url} does not answer with a WebSocket: {error}.", refused=True) from error
        except (OSError, TimeoutError, EOFError) as error:
            raise TransportError(_unreachable(url, error)) from error
        return cls(connection, url)

    async def send(self, message: wire.ClientMessage) -> None:
        """Send one message, waiting while the network is slower; raises `TransportError`."""
        try:
            await self._connection.send(wire.encode(message))
        except ConnectionClosed as error:
            raise TransportError(self._closed(error)) from error

    async def messages(self) -> AsyncIterator[wire.ServerMessage]:
        """Every message from the server until the connection ends, which raises `TransportError`."""
        try:
            while True:
                data = await self._connection.recv(decode=False)
                yield wire.decode_server_message(data)
        except ConnectionClosed as error:
            raise TransportError(self._closed(error)) from error
        except wire.WireError as error:
            raise TransportError(f"{self._url} sent something else than this protocol: {error}.") from error

    def _closed(self, error: ConnectionClosed) -> str:
        reason = f" ({error.rcvd.code} {error.rcvd.reason})".replace(" )", ")") if error.rcvd else ""
        return f"the connection to {self._url} ended{reason}; reconnecting. Nothing is lost."

    async def close(self) -> None:
        """Close it, waiting two seconds at most for the server's farewell."""
        await self._connection.close()


async def post(url: str, token: str | None, batch: wire.Batch) -> wire.BatchResult:
    """One round of the conversation by POST; raises `TransportError`."""
    data = await _in_daemon_thread(lambda: _post(url, token, wire.encode(batch)))
    try:
        answer = wire.decode_server_message(data)
    except wire.WireError as error:
        raise TransportError(
            f"{url} answered a POST with something else than this protocol: {error}."
        ) from error
    if isinstance(answer, wire.Problem):
        answer = wire.BatchResult(
            welcome=wire.Welcome(protocol=wire.PROTOCOL_VERSION, server_version="", acked=()),
            problems=(answer,),
        )
    if not isinstance(answer, wire.BatchResult):
        raise TransportError(f"{url} answered a POST with a {type(answer).__name__}, not a BatchResult.")
    return answer


async def _in_daemon_thread(work: Callable[[], bytes]) -> bytes:
    """Like `asyncio.to_thread`, but the end of the process does not wait for a request that nobody waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[bytes] = loop.create_future()

    def settle(result: bytes | None, error: TransportError | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result or b"")

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except TransportError as raised:
            error = raised
        with contextlib.suppress(RuntimeError):
            # The loop is closed: the uplink has ended meanwhile.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="post", daemon=True).start()
    return await future


def _post(url: str, token: str | None, body: bytes) -> bytes:
    address = post_url(url)
    headers = {"Content-Type": "application/msgpack", **_authorization(token)}
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")  # noqa: S310
    handlers = [urllib.request.ProxyHandler({})] if _is_loopback(address) else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=_POST_TIMEOUT_S) as answer:
            return bytes(answer.read(_MOST_BODY_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            data = error.read(_MOST_BODY_BYTES)
        if "msgpack" in error.headers.get("Content-Type", ""):
            return data
        detail = data[:300].decode(errors="replace").strip()
        raise TransportError(f"{_refusal(url, error.code)} {detail}".strip(), refused=True) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise TransportError(_unreachable(url, error)) from error


def _authorization(token: str | None) -> dict[str, str]:
    # Checked again: what refuses a bad header quotes it.
    return {"Authorization": f"Bearer {checked_token(token)}"} if token else {}


def _is_loopback(address: str) -> bool:
    host = urllib.parse.urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refusal(url: str, status: int) -> str:
    if status in (401, 403):
        return f"{url} refused the token ({status}): set GRADIOMETER_TOKEN to the server's own."
    if status == 503:
        return f"{url} is busy or starting (503); trying again."
    return f"{url} refused the connection with status {status}: is GRADIOMETER_URL the address of a Gradiometer server?"


def _unreachable(url: str, error: BaseException) -> str:
    why = str(getattr(error, "reason", "") or error) or type(error).__name__
    return f"cannot reach {url}: {why}. Start the server with `gradiometer serve`, or set GRADIOMETER_URL."
