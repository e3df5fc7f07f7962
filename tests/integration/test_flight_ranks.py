"""The flight recorder of several ranks: all save together, the dump is whole, and one process replays it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradiometer import replay
from gradiometer.capture import dump
from tests.integration import flight_ranks
from tests.support.eventually import eventually
from tests.support.paths import PYTHONPATH
from tests.support.server import Server


def train(kind, one, tmp_path):
    """Run the training under torchrun against a server."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(Path(flight_ranks.__file__)), kind, str(tmp_path / "dumps"), str(tmp_path)]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, "GRADIOMETER_URL": one.url,
        "GRADIOMETER_RUN_ID": kind, "GRADIOMETER_LINGER_S": "30",
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1"])
def test_all_ranks_save_the_step_that_one_of_them_spoiled(
    kind: str, server: Callable[..., Server], spool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = server()
    train(kind, one, tmp_path)
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["failures"] for rank in said] == [{}, {}]

    folder = tmp_path / "dumps" / kind / f"step-{flight_ranks.BAD_STEP:08d}"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    manifest = dump.read_manifest(folder)
    assert (manifest.world_size, manifest.trigger, manifest.trigger_rank) == (
        2,
        "output",
        flight_ranks.BAD_RANK,
    )
    for rank in range(2):
        (batch,) = dump.read_rank(folder, rank)["batches"]
        assert torch.equal(batch["x"], flight_ranks.batch_of(rank, flight_ranks.BAD_STEP)["x"])
    state = dump.read_state(folder, tmp_path)
    for name, values in (said[0]["weights"] or {}).items():
        assert torch.equal(state["model"][name], torch.tensor(values)), name
    assert state["optimizers"]["state"]

    capsys.readouterr()
    code = replay.main([str(folder), "--with", "tests.integration.flight_training:build"])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert "first operation: aten.exp.default, forward, in sharpen" in out
    # The other rank's batch was fine: nothing comes up there.
    assert replay.main([str(folder), "--with", "tests.integration.flight_training:build", "--rank", "0"]) == 1

    eventually(lambda: one.get(f"/runs/{kind}")["state"] == "finished", 30)
    (saved,) = one.get(f"/runs/{kind}")["dumps"]
    assert (saved["step"], saved["rank"], saved["path"]) == (
        manifest.step,
        manifest.trigger_rank,
        str(folder),
    )
    assert saved["num_bytes"] == dump.folder_bytes(folder)


@pytest.mark.slow
def test_a_recorder_that_breaks_on_one_rank_ends_on_all_and_holds_nobody_up(
    server: Callable[..., Server], spool: Path, tmp_path: Path
) -> None:
    one = server()
    started_s = time.monotonic()
    train("broken", one, tmp_path)
    assert time.monotonic() - started_s < 100, "a rank waited for the other's recorder"
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["failures"] for rank in said] == [{"flight recorder": 1}] * 2
    assert not list(tmp_path.glob("dumps/*/*"))
    eventually(lambda: one.get("/runs/broken")["state"] == "finished", 30)
    assert "rank 1 cannot tell" in one.get("/runs/broken")["unavailable"]["flight recorder"]
