"""The live feed of a real server: what an agent reports is pushed to the browsers that watch."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from gradiometer_server.api import schemas
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, scalar_schema

RUN = "live/run"


@pytest.fixture
def one(server: Callable[..., Server]) -> Server:
    return server()


class Page:
    """A browser's socket."""

    def __init__(self, one: Server, *runs: str | None, **options: Any) -> None:
        self.socket: ClientConnection = connect(
            f"ws://127.0.0.1:{one.port}/api/v1/live", proxy=None
        ).__enter__()
        # Closed by the fixture.
        assert self.next("hello")["version"] == 1
        for run in runs:
            self.send({"type": "subscribe", "run": run})

    def send(self, message: Any) -> None:
        self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    def next(self, kind: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """The next message of a kind; others are passed over."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            message: dict[str, Any] = json.loads(self.socket.recv(max(0.0, deadline_s - time.monotonic())))
            if message["type"] == kind:
                return message

    def synchronise(self) -> None:
        """Return when the server has obeyed everything sent so far: it answers in order."""
        self.send("{}")
        self.next("problem")


@pytest.fixture
def page(one: Server) -> Iterator[Callable[..., Page]]:
    made: list[Page] = []

    def open_page(*runs: str | None, **options: Any) -> Page:
        made.append(Page(one, *runs, **options))
        made[-1].synchronise()
        return made[-1]

    yield open_page
    for each in made:
        each.socket.close()


def test_points_alerts_and_the_end_of_a_run_are_pushed(one: Server, page: Callable[..., Page]) -> None:
    run_page, runs_list, other = page(RUN), page(None), page("another run")
    with WireClient(one.url, RUN) as agent:
        agent.hello()
        assert runs_list.next("run")["run"]["id"] == RUN
        agent.send(scalar_schema("train/loss"), frame({1: [0.5], 2: [0.25]}))
        assert run_page.next("metrics")["run"] == RUN
        points = {}
        while len(points) < 2:
            message = run_page.next("points")
            assert message["run"] == RUN
            for series in message["series"]:
                if series["metric"] == "train/loss":
                    points |= dict(zip(series["steps"], series["values"], strict=True))
        assert points == {1: 0.5, 2: 0.25}
        agent.send(frame({3: [float("nan")]}))
        alert = run_page.next("alert")
        assert alert["run"] == RUN
        schemas.Alert.model_validate(alert["alert"])
        assert one.get(f"/alerts/?run={RUN}".replace("/?", "?"))["alerts"][0]["id"] == alert["alert"]["id"]
        agent.send(exit_event(1))
    while (run := runs_list.next("run")["run"])["state"] == "running":
        pass
    schemas.Run.model_validate(run)
    assert run["state"] == "failed"
    other.synchronise()


def test_unsubscribing_ends_the_stream(one: Server, page: Callable[..., Page]) -> None:
    leaver, watcher = page(RUN), page(RUN)
    leaver.send({"type": "unsubscribe", "run": RUN})
    leaver.synchronise()
    with WireClient(one.url, RUN) as agent:
        agent.hello()
        agent.send(scalar_schema("a"), frame({1: [1.0]}))
        watcher.next("points")
    leaver.send("{}")
    assert json.loads(leaver.socket.recv(10))["type"] == "problem"


@pytest.mark.parametrize(
    "message",
    ["not json", "[]", "{}", '{"type": "subscribe"}', '{"type": "dance"}', '{"type": "subscribe", "run": 5}', b"\x00",
     '{"type": "subscribe", "run": ""}', '{"type": "subscribe", "run": "' + "x" * 5000 + '"}'],
)  # fmt: skip
def test_a_bad_message_is_answered_and_the_connection_stays(
    page: Callable[..., Page], message: str | bytes
) -> None:
    one_page = page()
    one_page.send(message)
    problem = one_page.next("problem")
    assert problem["code"] == "invalid_message"
    assert problem["remedy"]
    one_page.synchronise()


def test_a_browser_that_does_not_read_is_told_to_resync_and_slows_nobody(
    one: Server, page: Callable[..., Page], request: pytest.FixtureRequest
) -> None:
    quick = page(RUN)
    # Small buffers on its side, so that what it does not read stays with the server.
    narrow = socket.socket()
    request.addfinalizer(narrow.close)
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.connect(("127.0.0.1", one.port))
    slow = page(sock=narrow, max_queue=1)
    slow.send({"type": "subscribe", "run": RUN})
    slow.synchronise()
    names = [f"m/{number}" for number in range(200)]
    num_steps = 2000
    with WireClient(one.url, RUN) as agent:
        agent.hello()
        agent.send(scalar_schema(*names))
        for start in range(1, num_steps, 20):
            agent.send(frame({step: [step / 3] * len(names) for step in range(start, start + 20)}))
    last = 0
    while last < num_steps:
        message = quick.next("points", 90)
        last = max([last, *(step for series in message["series"] for step in series["steps"])])
    # Now it reads, and with a window wide enough that what has piled up in the kernel does not take minutes.
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    assert slow.next("resync", 60)["run"] == RUN
