"""Runs the application: the listening socket, uvicorn, signals, and an orderly stop with a deadline.

The lifespan runs here rather than inside uvicorn: an error at the start then reaches the command line as itself, and
at the stop uvicorn has closed every connection before the fold and the log are flushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI

from gradiometer import wire
from gradiometer_server.errors import ConfigurationError
from gradiometer_server.main import create_app
from gradiometer_server.settings import Settings

logger = logging.getLogger(__name__)

CONNECTIONS_DEADLINE_S: Final = 5
STOP_DEADLINE_S: Final = 25.0
"""From the signal to the end of the process; after it the process ends by itself. The log is durable at any moment,
so what was not folded by then is folded at the next start."""
_BACKLOG: Final = 512
_SWITCH_INTERVAL_S: Final = 0.0005
_STDIN: Final = 0
_AFTER_PARENT_S: Final = 3.0
"""Between the death of the parent and the stop: its trainings' uplinks still deliver how they ended."""


def serve(settings: Settings, *, until_stdin_ends: bool = False) -> int:
    """Serve until SIGINT or SIGTERM, or a moment after the end of standard input; returns the exit code.

    Raises:
        ConfigurationError: the port is in use, the address is not this machine's, or the database cannot be used.
    """
    if until_stdin_ends:
        threading.Thread(target=_stop_when_stdin_ends, name="parent", daemon=True).start()
    # Each step of an ack takes the interpreter back from threads that fold; five milliseconds a time are too many.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with contextlib.closing(_listen(settings)) as listener:
        asyncio.run(_run(create_app(settings), settings, listener))
    return 0


def _stop_when_stdin_ends() -> None:
    # The kernel closes the other end with the process that holds it, however that ends.
    with contextlib.suppress(OSError):
        while os.read(_STDIN, 4096):
            pass
    threading.Event().wait(_AFTER_PARENT_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _listen(settings: Settings) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(settings, error) from error
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(settings, error) from error
    return listener


def _cannot_listen(settings: Settings, error: OSError) -> ConfigurationError:
    where = f"{settings.host} port {settings.port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigurationError(
            f"{where} is in use by another program.",
            remedy="Choose another with --port (0: any free one), or stop that program.",
        )
    if error.errno == errno.EACCES:
        return ConfigurationError(
            f"{where} needs more rights than this user has.", remedy="Use a port above 1023."
        )
    return ConfigurationError(
        f"cannot listen on {where}: {error.strerror or error}.",
        remedy="Use an address of this machine, e.g. 127.0.0.1.",
    )


class _Server(uvicorn.Server):
    """uvicorn without its own idea of signals and with our line once it listens."""

    def __init__(self, config: uvicorn.Config, url: str) -> None:
        super().__init__(config)
        self._url = url

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again when its connections are closed, which would end us before the flush.
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(f"Gradiometer is at {self._url}", flush=True)  # noqa: T201  scripts read this line


async def _run(app: FastAPI, settings: Settings, listener: socket.socket) -> None:
    server = _Server(_config(app), _url(settings, listener))
    watchdog = _Watchdog()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        watchdog.start()

    with _signals(on_signal):
        async with app.router.lifespan_context(app):
            if not server.should_exit:
                await server.serve([listener])
            watchdog.start()
        watchdog.cancel()
    logger.info("stopped")


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="websockets-sansio",
        # Above the limit of the agents' door, so that a message beyond it is read and answered by a problem that says
        # so; from here on the protocol layer drops the connection with a bare 1009.
        ws_max_size=2 * wire.MAX_MESSAGE_BYTES,
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        # Gradients do not compress, and deflating them would cost the ingest more than anything else.
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=CONNECTIONS_DEADLINE_S,
    )


def _url(settings: Settings, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    host = settings.host.strip("[]")
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}{settings.path_prefix}/"


@contextlib.contextmanager
def _signals(handler: signal.Handlers | object) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class _Watchdog:
    """Ends the process when an orderly stop takes too long: a supervisor must not have to."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(STOP_DEADLINE_S, self._end)
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @staticmethod
    def _end() -> None:
        logger.error("the stop took longer than %d s; ending at once", STOP_DEADLINE_S)
        os._exit(1)
