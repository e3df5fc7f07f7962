"""Many trainings and many readers on one server with SQLite: nobody gets an error, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.eventually import eventually
from tests.support.server import Server

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


@pytest.mark.slow
def test_R55_fifty_runs_that_start_at_once_are_all_kept(
    server: Callable[..., Server], tmp_path: Path
) -> None:
    one = server()
    names = [f"job-{number}" for number in range(50)]
    assert_ended_well([training(one, tmp_path / "spool" / name, name, "100", "0") for name in names])
    with httpx.Client(base_url=f"{one.url}/api/v1", timeout=60) as client:
        for name in names:
            eventually(lambda name=name: is_whole(client, name, 100), 60, what=f"{name} is whole")  # type: ignore[misc]
    assert " 500 " not in one.log
    assert "ERROR" not in one.log


@pytest.mark.slow
def test_R54_readers_and_a_writer_do_not_lock_each_other_out(
    server: Callable[..., Server], tmp_path: Path
) -> None:
    one = server()
    num_steps = 500
    over = threading.Event()
    answers: list[int] = []

    def read_all_the_time() -> None:
        with httpx.Client(base_url=f"{one.url}/api/v1", timeout=60) as client:
            while not over.is_set():
                asked = {"series": [{"run": "busy", "metric": "train/loss"}], "buckets": 500}
                # A run that is not known yet is no error of the database.
                for answer in (client.get("/runs"), client.post("/series/query", json=asked)):
                    answers.append(answer.status_code)

    readers = [threading.Thread(target=read_all_the_time) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        assert_ended_well([training(one, tmp_path / "spool", "busy", str(num_steps), "0.02")])
    finally:
        over.set()
        for reader in readers:
            reader.join()
    with httpx.Client(base_url=f"{one.url}/api/v1", timeout=60) as client:
        eventually(lambda: is_whole(client, "busy", num_steps), 60, what="every point is stored")
    assert len(answers) > 100
    assert [code for code in answers if code >= 500] == []
    assert "locked" not in one.log
