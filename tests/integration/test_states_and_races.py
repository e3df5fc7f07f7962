"""A run that falls silent and comes back; one source on two connections; a stop and a kill under streaming agents."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from gradiometer import wire
from gradiometer_server.live.states import INTERVAL_S
from gradiometer_server.store.database import Database
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, frame, scalar_schema

Factory = Callable[..., Server]


def steps(server: Server, run: str) -> list[int]:
    asked = {"series": [{"run": run, "metric": "loss"}], "from": 0, "to": 4000, "buckets": 5000}
    found: list[int] = server.post("/series/query", asked)["series"][0]["points"]["step"]
    return found


def alive(client: WireClient) -> bytes:
    source = wire.SourceStatus(rank=0, attempt=client.source.attempt, alive=True, spooled_seq=0)
    return wire.encode(wire.Status(sources=(source,)))


def next_state(browser: ClientConnection) -> str:
    while True:
        message: dict[str, Any] = json.loads(browser.recv(timeout=15))
        if message["type"] == "run":
            return str(message["run"]["state"])


def age(database_url: str, seconds: float) -> None:
    """As if the last sign of life were so much older."""
    database = Database(database_url)
    with database.write() as conn:
        conn.execute(text("UPDATE run SET heartbeat_s = heartbeat_s - :s"), {"s": seconds})
    database.close()


def test_a_silent_run_is_shown_as_lost_and_comes_back(server: Factory, database_url: str) -> None:
    one = server(database_url)
    address = one.url.replace("http", "ws", 1) + "/api/v1/live"
    with WireClient(one.url, "r") as client, connect(address, proxy=None) as browser:
        client.hello()
        client.send(scalar_schema("loss"), frame({1: [1.0]}))
        browser.send(json.dumps({"type": "subscribe", "run": None}))
        client.send(frame({2: [1.0]}))
        assert next_state(browser) == "running"
        # The watcher tells of changes between two of its looks, so it must have seen the run alive.
        began_s = time.monotonic()
        eventually(lambda: time.monotonic() - began_s > 2 * INTERVAL_S, what="the watcher has looked")
        age(database_url, 40)
        eventually(lambda: next_state(browser) == "lost", 20, what="the page is told that the run is lost")
        assert one.get("/runs/r")["state"] == "lost"
        assert [run["id"] for run in one.get("/runs", state="lost")["runs"]] == ["r"]
        client.send_raw(alive(client))
        eventually(lambda: next_state(browser) == "running", 20, what="the page is told that it is back")
        assert client.send(frame({3: [1.0]})).rejected == ()
    assert one.get("/runs/r")["state"] == "running"
    eventually(lambda: steps(one, "r") == [1, 2, 3], what="all steps")


def test_one_source_on_two_connections_is_stored_once(server: Factory, database_url: str) -> None:
    one = server(database_url)
    with WireClient(one.url, "r") as first, WireClient(one.url, "r") as second:
        first.hello()
        second.hello()
        first.send(scalar_schema("loss"))
        second.send(scalar_schema("loss"))
        threads = [threading.Thread(target=_send_steps, args=(client, 300)) for client in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    eventually(lambda: steps(one, "r") == list(range(1, 301)), 30, what="every step once")
    metric = next(row for row in one.get("/runs/r/metrics")["metrics"] if row["name"] == "loss")
    assert metric["num_points"] == 300
    assert one.get("/runs/r")["rejected_records"] == 0


def _send_steps(client: WireClient, last: int) -> None:
    """Resends, should the other connection be behind."""
    step = client.next_seq - 1
    while step <= last:
        client.post(frame({step: [float(step)]}), first_seq=step + 1)
        answer = client.receive(30)
        if isinstance(answer, wire.Ack):
            step = answer.seq
        elif isinstance(answer, wire.Problem):
            step = (answer.expected_seq or step + 1) - 1


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_what_was_acknowledged_before_the_end_is_there_after_it(
    server: Factory, database_url: str, way: str
) -> None:
    one = server(database_url)
    acked: dict[str, int] = {}
    threads = [threading.Thread(target=_stream, args=(one.url, f"r{n}", acked)) for n in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(acked) == 3 and min(acked.values()) > 300, 30, what="all three stream")
    (one.stop if way == "stop" else one.kill)()
    for thread in threads:
        thread.join(30)
    one.start()
    for run, last in acked.items():
        found = steps(one, run)
        assert found == list(range(1, len(found) + 1)), "no hole, nothing double"
        assert len(found) >= last


def _stream(url: str, run: str, acked: dict[str, int]) -> None:
    with WireClient(url, run) as client:
        client.hello()
        client.send(scalar_schema("loss"))
        for step in range(1, 4000):
            try:
                client.send(frame({step: [float(step)]}))
            except (ConnectionClosed, AssertionError, TimeoutError):
                return
            acked[run] = step
