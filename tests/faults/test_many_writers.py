"""Many trainings and many readers on one server with SQLite: nobody gets an error, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from websockets.sync.client import connect

from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, scalar_schema

MOST_SERVER_BYTES = 400 * 1024 * 1024

RUN = """
import sys, time
import gradiometer as gm
name, num_steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with gm.init(project="many", run_id=name) as run:
    for step in range(1, num_steps + 1):
        run.log({"train/loss": 1.0 / step}, step=step)
        time.sleep(pause_s)
    run.finish(deadline_s=60)
assert run.dropped == {}, run.dropped
"""


def training(one: Server, spool: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "GRADIOMETER_URL": one.url, "GRADIOMETER_SPOOL": str(spool)}
    return subprocess.Popen([sys.executable, "-c", RUN, *arguments], env=environment, stderr=subprocess.PIPE)


def assert_ended_well(trainings: list[subprocess.Popen[bytes]]) -> None:
    for one in trainings:
        _, stderr = one.communicate(timeout=120)
        assert one.returncode == 0, stderr.decode()


def stored_steps(client: httpx.Client, run: str) -> list[int]:
    asked = {"series": [{"run": run, "metric": "train/loss"}], "buckets": 5000}
    answer = client.post("/series/query", json=asked)
    assert answer.status_code == 200, answer.text
    steps: list[int] = answer.json()["series"][0]["points"]["step"]
    return steps


def is_whole(client: httpx.Client, run: str, num_steps: int) -> bool:
    about = client.get(f"/runs/{run}")
    return (
        about.status_code == 200
        and about.json()["state"] == "finished"
        and stored_steps(client, run) == list(range(1, num_steps + 1))
    )


@contextmanager
def peak_bytes(process: psutil.Process) -> Iterator[list[int]]:
    """The resident memory of a process, as often as it can be looked at."""
    seen, over = [process.memory_info().rss], threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            seen.append(process.memory_info().rss)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


@pytest.mark.slow
def test_R55_fifty_runs_that_start_at_once_are_all_kept(
    server: Callable[..., Server], tmp_path: Path
) -> None:
    one = server()
    names = [f"job-{number}" for number in range(50)]
    with peak_bytes(psutil.Process(one.pid)) as seen:
        assert_ended_well([training(one, tmp_path / "spool" / name, name, "100", "0") for name in names])
        with httpx.Client(base_url=f"{one.url}/api/v1", timeout=60) as client:
            for name in names:
                eventually(lambda name=name: is_whole(client, name, 100), 60, what=f"{name} is whole")  # type: ignore[misc]
            listed = client.get("/runs", params={"limit": 100}).json()["runs"]
    assert sorted(run["id"] for run in listed) == sorted(names)
    assert max(seen) < MOST_SERVER_BYTES, "the server's memory does not grow with the number of agents"
    assert " 500 " not in one.log
    assert "ERROR" not in one.log


class Readers:
    """Three that poll and three that stream, from the moment they are made until `stop`."""

    def __init__(self, one: Server, run: str) -> None:
        self._one, self._run, self._over = one, run, threading.Event()
        self.answers: list[int] = []
        self.num_pushed = [0, 0, 0]
        self._threads = [threading.Thread(target=self._poll) for _ in range(3)]
        self._threads += [threading.Thread(target=self._stream, args=(place,)) for place in range(3)]
        for thread in self._threads:
            thread.start()

    def _poll(self) -> None:
        asked = {"series": [{"run": self._run, "metric": "train/loss"}], "buckets": 500}
        with httpx.Client(base_url=f"{self._one.url}/api/v1", timeout=60) as client:
            while not self._over.is_set():
                # A run that is not known yet is no error of the database.
                for answer in (client.get("/runs"), client.post("/series/query", json=asked)):
                    self.answers.append(answer.status_code)

    def _stream(self, place: int) -> None:
        with connect(f"ws://127.0.0.1:{self._one.port}/api/v1/live", proxy=None) as socket:
            socket.send(json.dumps({"type": "subscribe", "run": self._run}))
            while not self._over.is_set():
                with contextlib.suppress(TimeoutError):
                    message = json.loads(socket.recv(0.2))
                    series = message["series"] if message["type"] == "points" else []
                    self.num_pushed[place] += sum(
                        len(s["steps"]) for s in series if s["metric"] == "train/loss"
                    )

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.slow
def test_R54_readers_and_a_writer_do_not_lock_each_other_out(
    server: Callable[..., Server], tmp_path: Path
) -> None:
    """50 points a second from an agent, and as many from a program that waits for each ack."""
    one, num_steps = server(), 500
    readers = Readers(one, "busy")
    try:
        trainings = [training(one, tmp_path / "spool", "busy", str(num_steps), "0.02")]
        writes_s = timed_writes(one, num_steps, 0.02)
        assert_ended_well(trainings)
        eventually(lambda: min(readers.num_pushed) >= num_steps, 10, what="every point was pushed")
    finally:
        readers.stop()
    with httpx.Client(base_url=f"{one.url}/api/v1", timeout=60) as client:
        for run in ("busy", "timed"):
            eventually(lambda run=run: is_whole(client, run, num_steps), 60, what="every point is stored")  # type: ignore[misc]
    assert len(readers.answers) > 100
    assert [code for code in readers.answers if code >= 500] == []
    assert readers.num_pushed == [num_steps] * 3, "nothing was pushed twice"
    assert sorted(writes_s)[int(0.95 * num_steps)] < 0.1, "p95 of a durable write"
    assert "locked" not in one.log


def timed_writes(one: Server, num_steps: int, pause_s: float) -> list[float]:
    """Seconds from sending a point to its ack, one point after the other."""
    took_s = []
    with WireClient(one.url, "timed") as client:
        client.hello()
        client.send(scalar_schema("train/loss"))
        for step in range(1, num_steps + 1):
            begun_s = time.monotonic()
            client.send(frame({step: [1.0 / step]}))
            took_s.append(time.monotonic() - begun_s)
            time.sleep(max(0.0, pause_s - took_s[-1]))  # the pace of the scenario, not a wait for something
        client.send(exit_event())
    return took_s
