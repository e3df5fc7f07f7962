"""Asks a real server as a program of somebody else would: over HTTP and WebSocket, with a strict JSON parser."""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any

import httpx
from websockets.sync.client import connect

from tests.support.eventually import eventually
from tests.support.server import Server

Points = list[tuple[int, float]]
RANGE = 4096


def strict(text: str | bytes) -> Any:
    """Parse JSON as the standard has it: Python alone would take NaN and Infinity for numbers."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def ask(one: Server, method: str, path: str, **options: Any) -> Any:
    """A request under `/api/v1` that must be answered with 200 and valid JSON."""
    answer = httpx.request(method, f"{one.url}/api/v1{path}", timeout=30, **options)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    return strict(answer.content)


def series(one: Server, run: str, metric: str, *, buckets: int = 5000, **which: Any) -> dict[str, Any]:
    """One metric of a run, from the first step to the last unless `which` says otherwise."""
    limits = {name: which.pop(name) for name in ("from", "to") if name in which}
    asked = {"series": [{"run": run, "metric": metric, **which}], "buckets": buckets, **limits}
    [found] = ask(one, "POST", "/series/query", json=asked)["series"]
    assert not found.get("error"), found
    return dict(found)


def points(one: Server, run: str, metric: str) -> Points:
    """Single points of a metric, each step once; asked for in ranges that are short enough to come as such."""
    line: Points = []
    last = series(one, run, metric, buckets=1)["last_step"]
    for first in range(0, last + 1, RANGE):
        found = series(one, run, metric, **{"from": first, "to": first + RANGE - 1})
        assert found["bucket_width"] == 1
        assert set(found["points"]["count"]) <= {1}
        line += zip(found["points"]["step"], found["points"]["mean"], strict=True)
    return line


def metrics(one: Server, run: str) -> dict[str, dict[str, Any]]:
    """All metrics of a run by name."""
    return {metric["name"]: metric for metric in ask(one, "GET", f"/runs/{run}/metrics")["metrics"]}


def ended(one: Server, run: str) -> dict[str, Any]:
    """The run, as soon as the server has seen its end."""
    return eventually(lambda: _if_ended(one, run), 30, what=f"{run} has ended")


def _if_ended(one: Server, run: str) -> dict[str, Any] | None:
    answer = httpx.get(f"{one.url}/api/v1/runs/{run}", timeout=30)
    if answer.status_code != 200:
        return None
    found: dict[str, Any] = strict(answer.content)
    return found if found["state"] != "running" else None


class Watcher:
    """A subscriber of the live feed; every message must be valid JSON."""

    def __init__(self, one: Server, run: str) -> None:
        self._socket = connect(f"{one.url.replace('http', 'ws', 1)}/api/v1/live", proxy=None).__enter__()
        self._socket.send(json.dumps({"type": "subscribe", "run": run}))
        self._socket.send("{}")
        self.next("problem")  # answers come in order: the subscription holds from here on

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def next(self, kind: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """The next message of a kind; others are passed over."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            message: dict[str, Any] = strict(self._socket.recv(max(0.0, deadline_s - time.monotonic())))
            if message["type"] == kind:
                return message
