"""A server that is away for long, or answers badly: the training neither waits nor grows, and the rest arrives once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.ingest_double import IngestDouble
from tests.support.eventually import eventually
from tests.support.recorded import Recorded, recorded
from tests.support.server import Server

MIB = 1024 * 1024
MOST_GROWTH_BYTES = 50 * MIB

LOGGING = """
import json, sys
import psutil
import gradiometer as gm
me = psutil.Process()
def say(**facts):
    print(json.dumps(facts), flush=True)
def tell(run):
    run._feeder.flush(30)
    say(rss=me.memory_info().rss, dropped=sum(run.dropped.values()), reasons=list(run.dropped))
run = gm.init(run_id="away")
for step in range(1, 100_001):
    run.log({"train/loss": 1.0 / step, "lr": 0.1}, step=step)
    if step in (5_000, 100_000):
        tell(run)
sys.stdin.readline()
for step in range(100_001, 101_001):
    run.log({"train/loss": 1.0 / step, "lr": 0.1}, step=step)
tell(run)
run.finish(deadline_s=30)
"""

WATCHING = """
import json, sys
import psutil, torch
import gradiometer as gm
torch.manual_seed(0)
torch.set_num_threads(1)
me = psutil.Process()
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(50)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with gm.init(run_id="watched") as run:
    run.watch(model, optimizer)
    for step in range(1, 2001):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 64)).square().mean()
        loss.backward()
        optimizer.step()
        run.log({"train/loss": loss})
        if step % 100 == 0:
            print(json.dumps({"step": step, "rss": me.memory_info().rss}), flush=True)
    print(json.dumps({"dropped": run.dropped, "failures": run.failures}), flush=True)
"""


@pytest.fixture
def double() -> Iterator[IngestDouble]:
    double = IngestDouble().start()
    yield double
    double.stop()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a training; what it writes to standard error is in `tmp_path / "errors"`."""
    started: list[subprocess.Popen[str]] = []

    def make(script: str, url: str, **settings: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "GRADIOMETER_URL": url, "GRADIOMETER_LINGER_S": "60", **settings}
        environment["OMP_NUM_THREADS"] = "1"
        with (tmp_path / "errors").open("w") as errors:
            one = subprocess.Popen(
                [sys.executable, "-c", script],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        started.append(one)
        return one

    yield make
    for one in started:
        one.kill()
        one.communicate()


def next_line(trainer: subprocess.Popen[str]) -> Any:
    assert trainer.stdout is not None
    return json.loads(trainer.stdout.readline())


def counts(server: Server, run: str, metric: str, first: int, last: int) -> list[int]:
    asked = {"series": [{"run": run, "metric": metric}], "from": first, "to": last, "buckets": 5000}
    [answer] = server.post("/series/query", asked)["series"]
    assert answer["bucket_width"] == 1
    return list(answer["points"]["count"])


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.seg"))


@pytest.mark.slow
def test_R05_R63_a_hundred_thousand_steps_without_a_server(
    server: Callable[..., Server], spool: Path, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    limit_bytes = 2 * MIB
    one = server()
    one.kill()
    trainer = start(LOGGING, one.url, GRADIOMETER_SPOOL_MAX_BYTES=str(limit_bytes))
    warm, away = next_line(trainer), next_line(trainer)
    assert away["rss"] - warm["rss"] < MOST_GROWTH_BYTES
    [rank] = spool.glob("away/*/rank-00000")
    assert MIB < size_bytes(rank) < limit_bytes + MIB
    assert away["reasons"] == ["the spool was full"]
    assert 10_000 < away["dropped"] < 90_000
    kept = 100_000 - away["dropped"]
    one.restart()
    eventually(lambda: size_bytes(rank) < MIB, 60.0, what="the spool drains")
    assert trainer.stdin is not None
    trainer.stdin.write("the server is back\n")
    trainer.stdin.flush()
    end = next_line(trainer)
    assert trainer.wait(60) == 0, (tmp_path / "errors").read_text()
    shown = eventually(lambda: (run := one.get("/runs/away"))["state"] == "finished" and run, 30.0)
    # Everything that the spool held, everything that came when there was room, each once, and a count of the rest.
    assert end["dropped"] == away["dropped"], "with the server back nothing is dropped any more"
    assert shown["dropped_reports"] == end["dropped"]
    found = [
        count
        for first in range(1, 101_001, 5000)
        for count in counts(one, "away", "train/loss", first, min(first + 4999, 101_000))
    ]
    assert set(found) == {1}
    assert len(found) == kept + 1000
    assert counts(one, "away", "train/loss", 100_001, 101_000) == [1] * 1000
    assert (tmp_path / "errors").read_text().count("the spool was full") == 1
    eventually(lambda: not rank.exists(), what="the spool is removed")


def test_R05_a_watched_training_does_not_grow_while_the_server_is_away(
    double: IngestDouble, spool: Path, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    double.stop()
    trainer = start(WATCHING, double.url)
    memory = {}
    for _ in range(20):
        line = next_line(trainer)
        memory[line["step"]] = line["rss"]
        if line["step"] == 1000:
            double.start()
    assert next_line(trainer) == {"dropped": {}, "failures": {}}
    assert trainer.wait(60) == 0, (tmp_path / "errors").read_text()
    growth_bytes = max(memory.values()) - memory[300]
    print(f"grew by {growth_bytes / MIB:.1f} MiB")
    assert growth_bytes < MOST_GROWTH_BYTES
    eventually(double.model.exits, 30.0, what="everything arrived")
    assert steps_of(double, "train/loss", tmp_path) == list(range(1, 2001))


def steps_of(double: IngestDouble, metric: str, folder: Path) -> list[int]:
    return list(delivered(double, folder).points[metric])


def delivered(double: IngestDouble, folder: Path) -> Recorded:
    """What the double has stored, read as a spool."""
    from gradiometer.spool import SpoolWriter

    rank = folder / "delivered"
    rank.mkdir()
    writer = SpoolWriter(rank)
    writer.append_batch(double.model.records())
    writer.close()
    return recorded(rank)


FLAKY = """
import json, time, threading
import gradiometer as gm
took_s = []
with gm.init(run_id="flaky") as run:
    for step in range(1, 201):
        started_s = time.perf_counter()
        run.log({"train/loss": 1.0 / step}, step=step)
        took_s.append(time.perf_counter() - started_s)
        threading.Event().wait(0.01)
    print(json.dumps({"dropped": run.dropped, "median_s": sorted(took_s)[100], "max_s": max(took_s)}), flush=True)
    started_s = time.perf_counter()
    run.finish(deadline_s=0.5)
    print(json.dumps({"finish_s": time.perf_counter() - started_s}), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("server", ["answers after ten seconds", "drops half of the requests"])
def test_R56_a_bad_server_does_not_slow_a_step(
    server: str,
    double: IngestDouble,
    spool: Path,
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    if server.startswith("answers"):
        double.behaviour.answer_after_s = 10.0
    else:
        double.behaviour.drop_every = 2
    trainer = start(FLAKY, double.url)
    told, finished = next_line(trainer), next_line(trainer)
    assert trainer.wait(30) == 0, (tmp_path / "errors").read_text()
    assert told["dropped"] == {}
    # A step is 10 ms long here: five per cent of it.
    assert told["median_s"] < 0.0005
    assert told["max_s"] < 1.0, "no step waited for the server"
    assert finished["finish_s"] < 3.0
    if server.startswith("answers"):
        assert double.model.records() == [], "all of it went on without one answer"
        double.behaviour.answer_after_s = 0.0
    started_s = time.monotonic()
    eventually(double.model.exits, 40.0, what="everything arrived later")
    print(f"complete {time.monotonic() - started_s:.1f} s after the training")
    assert steps_of(double, "train/loss", tmp_path) == list(range(1, 201))
    eventually(lambda: not list(spool.rglob("*.seg")), 20.0, what="the spool is empty")
