"""`kill -9` of the server again and again under a real training: the training never notices and nothing is lost."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.support.server import Server

STEPS = 1000
PERIOD_S = 0.03
KILLS = 20


def lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of the trainer's own log."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def stored(server: Server, run: str, metric: str) -> dict[int, float]:
    """Raw points of a merged metric, by step."""
    body = {"series": [{"run": run, "metric": metric}], "buckets": 5000}
    (answer,) = server.post("/series/query", body)["series"]
    assert answer["bucket_width"] == 1, answer
    assert all(count == 1 for count in answer["points"]["count"]), "a step is there twice"
    return dict(zip(answer["points"]["step"], answer["points"]["mean"], strict=True))


@pytest.mark.slow
def test_R57_no_step_is_missing_or_double_after_twenty_server_kills(
    server: Callable[..., Server], spool: Path, tmp_path: Path
) -> None:
    one = server()
    log = tmp_path / "trainer.jsonl"
    environment = {
        **os.environ,
        "GRADIOMETER_URL": one.url,
        "GRADIOMETER_RUN_ID": "survivor",
        "GRADIOMETER_LINGER_S": "60",
    }
    command = [sys.executable, "-m", "tests.faults.steady_trainer", str(STEPS), str(PERIOD_S), str(log)]
    with (tmp_path / "trainer.out").open("wb") as out:
        trainer = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    choose = random.Random(4)
    pause = threading.Event()
    try:
        eventually(lambda: len(lines(log)) > 20, 60, what="the training is under way")
        for _ in range(KILLS):
            pause.wait(choose.uniform(0.05, 0.8))
            one.kill()
            pause.wait(choose.uniform(0.0, 0.5))
            one.restart()
        assert trainer.wait(120) == 0, (tmp_path / "trainer.out").read_text()
    finally:
        trainer.kill()
        trainer.wait()
    eventually(lambda: one.get("/runs/survivor")["state"] == "finished", 60, what="the run's end arrived")
    said = {line["step"]: line["loss"] for line in lines(log)}
    assert list(said) == list(range(1, STEPS + 1))
    assert stored(one, "survivor", "train/loss") == said
    assert list(stored(one, "survivor", "grad/norm")) == list(range(1, STEPS + 1))
    eventually(lambda: not list(spool.rglob("*.seg")), 30, what="the spool is empty")
