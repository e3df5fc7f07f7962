"""R62: a disk that takes no more, under the agent's spool and under the server's database, and then takes again."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import gradiometer as gm
from tests.support.eventually import eventually
from tests.support.recorded import recorded
from tests.support.server import Server

pytestmark = pytest.mark.skipif(
    not hasattr(resource, "prlimit"), reason="limits of another process are Linux's"
)

TRAINING = """
import json, logging, sys
import torch
import gradiometer as gm
logging.basicConfig()
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = gm.init(run_id="full", mode="offline")
run.watch(model, optimizer)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        run.log({"train/loss": 1.0})
    run._feeder.flush(20)
    print(json.dumps({"step": run.step, "dropped": run.dropped}), flush=True)
    sys.stdin.readline()
train(100)
train(500)
train(100)
run.finish()
"""


def limit_files(pid: int, num_bytes: int) -> None:
    """From now on the process can make no file longer: a write fails as on a full disk, partly or whole."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def test_R62_a_training_goes_on_while_the_disk_of_its_spool_is_full(spool: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINING],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None

    def step() -> dict[str, object]:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        return dict(json.loads(trainer.stdout.readline()))

    assert json.loads(trainer.stdout.readline()) == {"step": 100, "dropped": {}}
    [rank] = spool.glob("full/*/rank-00000")
    size_bytes = max(path.stat().st_size for path in rank.glob("*.seg"))
    limit_files(trainer.pid, size_bytes + 2000)
    during = step()
    assert during["step"] == 600
    assert list(during["dropped"]) == ["the spool could not be written"]  # type: ignore[call-overload]
    limit_files(trainer.pid, resource.RLIM_INFINITY)
    assert step()["step"] == 700
    _, errors = trainer.communicate("\n", timeout=60)
    assert trainer.returncode == 0, errors
    assert errors.count("WARNING") == 1, errors
    assert str(rank) in errors
    assert "Free space there" in errors
    out = recorded(rank)
    losses, layers = out.points["train/loss"], out.layers["weight"]
    assert set(range(1, 90)) <= set(losses)
    assert set(range(602, 701)) <= set(losses)
    assert set(range(602, 701)) <= set(layers)
    missing = 700 - len(losses) + 700 - len(layers)
    dropped = out.of_kind("dropped")
    assert sum(event.attributes["reports"] for event in dropped) == missing > 100
    assert {event.attributes["reason"] for event in dropped} == {"the spool could not be written"}


def test_R62_a_server_whose_disk_is_full_keeps_the_data_with_its_agents(
    server: Callable[..., Server],
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = server()
    monkeypatch.setenv("GRADIOMETER_URL", one.url)
    monkeypatch.setenv("GRADIOMETER_LINGER_S", "60")
    run = gm.init(run_id="stored")
    run.log({"train/loss": 1.0}, step=1)
    eventually(lambda: one.get("/runs/stored")["latest"] == {"train/loss": 1.0}, what="the first point")
    limit_files(one.pid, 4096)
    for step in range(2, 3000):
        run.log({"train/loss": float(step)}, step=step)
    attempt = run.directory.parent  # type: ignore[union-attr]
    state = attempt / "uplink.json"
    trouble = eventually(
        lambda: json.loads(state.read_text())["last_error"], 30.0, what="the uplink is told why"
    )
    print(trouble)
    assert "store_unavailable" in trouble or "503" in trouble
    ready = httpx.get(f"{one.url}/readyz")
    assert (ready.status_code, ready.json()["code"]) == (503, "store_unavailable"), "nothing can be written"
    assert "cannot be written" in ready.json()["detail"]
    run.finish(deadline_s=1.0)
    assert "are still in the spool" in caplog.text
    assert one.get("/runs/stored")["latest"] == {"train/loss": 1.0}, "what it has can still be read"
    limit_files(one.pid, resource.RLIM_INFINITY)
    eventually(lambda: one.get("/runs/stored")["state"] == "finished", 60.0, what="the rest arrived")
    assert httpx.get(f"{one.url}/readyz").status_code == 200
    asked = {"series": [{"run": "stored", "metric": "train/loss"}], "buckets": 5000}
    [answer] = one.post("/series/query", asked)["series"]
    assert answer["points"]["step"] == list(range(1, 3000))
    assert set(answer["points"]["count"]) == {1}
    eventually(lambda: not attempt.exists(), 20.0, what="the spool is empty")
