"""`WS /api/v1/live`: one browser's connection. Two tasks: one reads what it asks for, one sends what it is owed."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from gradiometer_server import __version__
from gradiometer_server.clock import Clock
from gradiometer_server.domain.jsonable import dumps
from gradiometer_server.live.hub import Browser, Hub

logger = logging.getLogger(__name__)

MAX_SUBSCRIPTIONS: Final = 200
MAX_MESSAGE_CHARS: Final = 4096
SEND_TIMEOUT_S: Final = 30.0
"""A browser whose socket takes nothing for this long is gone, whatever its TCP says."""
LIVE_VERSION: Final = 1


class _Subscribe(msgspec.Struct, tag="subscribe", frozen=True):
    run: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None


class _Unsubscribe(msgspec.Struct, tag="unsubscribe", frozen=True):
    run: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None


_decoder = msgspec.json.Decoder(_Subscribe | _Unsubscribe)


class _BadMessage(Exception):
    def __init__(
        self, code: Literal["invalid_message", "too_many_subscriptions"], detail: str, remedy: str
    ) -> None:
        self.code, self.detail, self.remedy = code, detail, remedy
        super().__init__(detail)

    def message(self) -> dict[str, Any]:
        return {"type": "problem", "code": self.code, "detail": self.detail, "remedy": self.remedy}


def live_router(hub: Hub, clock: Clock) -> APIRouter:
    """The route, to be mounted under `/api/v1`."""
    router = APIRouter()

    @router.websocket("/live")
    async def live(websocket: WebSocket) -> None:
        await websocket.accept()
        browser = hub.connect()
        try:
            hello = {"type": "hello", "version": LIVE_VERSION, "server_version": __version__}
            await websocket.send_text(dumps(hello).decode())
            await _until_first_ends(_read(websocket, hub, browser), _send(websocket, browser, clock))
        except (WebSocketDisconnect, TimeoutError):
            # Gone, or as good as gone; returning closes the connection.
            logger.debug("a browser has gone")
        finally:
            hub.disconnect(browser)

    return router


async def _until_first_ends(*work: Any) -> None:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(websocket: WebSocket, hub: Hub, browser: Browser) -> None:
    while True:
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return
        try:
            _obey(message.get("text"), hub, browser)
        except _BadMessage as problem:
            browser.queue.add(("problem", None), problem.message())
            browser.wake.set()


def _obey(text: str | None, hub: Hub, browser: Browser) -> None:
    wanted = _decode(text)
    if isinstance(wanted, _Unsubscribe):
        hub.unsubscribe(browser, wanted.run)
        return
    if len(browser.runs) >= MAX_SUBSCRIPTIONS and wanted.run not in browser.runs:
        raise _BadMessage(
            "too_many_subscriptions",
            f"this connection already watches {MAX_SUBSCRIPTIONS} runs",
            "Unsubscribe from some, or open another connection.",
        )
    hub.subscribe(browser, wanted.run)


def _decode(text: str | None) -> _Subscribe | _Unsubscribe:
    remedy = 'Send {"type": "subscribe", "run": "<run id>"}, or null for the list of runs.'
    if text is None or len(text) > MAX_MESSAGE_CHARS:
        what = "binary" if text is None else f"{len(text)} characters long"
        raise _BadMessage("invalid_message", f"the message is {what}; it must be a short JSON text", remedy)
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _BadMessage("invalid_message", f"not a message of the live feed: {error}", remedy) from error


async def _send(websocket: WebSocket, browser: Browser, clock: Clock) -> None:
    # Hot path: one pass per message. A browser that reads slowly blocks in `send_text`, and only its own queue grows.
    while True:
        wait_s = browser.queue.wait_s(clock.monotonic_s())
        if wait_s is None:
            await browser.wake.wait()
        elif wait_s > 0:
            # An alert, or points of another run, need not wait for this run's turn.
            await _sleep_or_wake(browser, wait_s)
        browser.wake.clear()
        for message in browser.queue.take(clock.monotonic_s()):
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await websocket.send_text(dumps(message).decode())


async def _sleep_or_wake(browser: Browser, wait_s: float) -> None:
    try:
        async with asyncio.timeout(wait_s):
            await browser.wake.wait()
    except TimeoutError:
        return
