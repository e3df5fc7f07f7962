"""A value that goes bad on one rank, with a real server: the alert names the rank, and its ring is there to read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.integration import ring_ranks
from tests.support.eventually import eventually
from tests.support.paths import PYTHONPATH
from tests.support.server import Server

WORLD_SIZE = 2


def train(kind, one, out):
    """Run the training under torchrun against a server; returns what each rank said about itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(Path(ring_ranks.__file__)), kind, str(out)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
        "GRADIOMETER_URL": one.url,
        "GRADIOMETER_RUN_ID": kind,
        "GRADIOMETER_LINGER_S": "30",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    assert [(rank["failures"], rank["dropped"]) for rank in said] == [({}, {})] * WORLD_SIZE
    eventually(lambda: one.get(f"/runs/{kind}")["state"] == "finished", 60, what="the run's end arrived")
    return said


def alert_of(one, run):
    found = one.get(f"/runs/{run}/alerts")["alerts"]
    return next(alert for alert in found if alert["rule"] == "non_finite")


@pytest.mark.slow
def test_R27_a_nan_on_one_fsdp_rank_names_it_and_its_first_layer_and_ships_256_steps_before(
    server: Callable[..., Server], spool: Path, tmp_path: Path
) -> None:
    one = server()
    said = train("gradient", one, tmp_path)
    bad_step, bad_rank = ring_ranks.BAD_STEP["gradient"], ring_ranks.BAD_RANK
    alert = alert_of(one, "gradient")
    assert (alert["severity"], alert["first_step"]) == ("critical", bad_step)
    assert (alert["rank"], alert["layer"], alert["origin"]) == (bad_rank, "body.2.weight", "backward")
    assert alert["layers"][:2] == ["body.2.weight", "body.0.weight"]

    ranks = {found["rank"]: found for found in one.get("/runs/gradient/ring")["ranks"]}
    ring = ranks[bad_rank]
    first = ring["parts"][0]
    assert (first["trigger_step"], first["reason"]) == (bad_step, "a gradient is not finite")
    assert ring["first_step"] == bad_step - 256
    assert ring["last_step"] >= bad_step + 8
    path = "/runs/gradient/ring/layers"
    found = one.get(path, rank=bad_rank, statistic="norm", to=bad_step - 1)
    steps = list(range(bad_step - 256, bad_step))
    assert found["steps"] == steps
    assert found["bucket_width"] == 1
    assert found["nonfinite"] == []
    norms = said[bad_rank]["norms"]
    expected = np.array([[norms[str(step)][name] for step in steps] for name in found["layers"]])
    assert expected.shape == (7, 256)
    np.testing.assert_allclose(np.array(found["values"], dtype=float), expected, rtol=1e-5, atol=1e-12)
    for statistic in ("rms", "mean", "std", "abs_max", "zero_fraction", "num_nonfinite"):
        of = one.get(path, rank=bad_rank, statistic=statistic, to=bad_step - 1)
        assert (of["steps"], of["nonfinite"]) == (steps, [])
        assert not any(value is None for row in of["values"] for value in row), statistic
    # Rank 0 has other shards: what is in the ring is not what was merged.
    others = np.array([[said[0]["norms"][str(step)][name] for step in steps] for name in found["layers"]])
    assert not np.allclose(others, expected, rtol=1e-2)
    at = one.get(path, rank=bad_rank, statistic="num_nonfinite", **{"from": bad_step, "to": bad_step})
    counts = dict(zip(at["layers"], (row[0] for row in at["values"]), strict=True))
    assert {name for name, count in counts.items() if count} == set(ring_ranks.BAD_LAYERS)


@pytest.mark.slow
def test_R27_a_nan_loss_on_rank_1_is_not_hidden_by_the_finite_one_on_rank_0(
    server: Callable[..., Server], spool: Path, tmp_path: Path
) -> None:
    one = server()
    train("loss", one, tmp_path)
    alert = alert_of(one, "loss")
    assert (alert["rank"], alert["first_step"]) == (ring_ranks.BAD_RANK, ring_ranks.BAD_STEP["loss"])
    assert "train/loss is NaN on rank 1" in alert["facts"]
    ranks = {found["rank"]: found for found in one.get("/runs/loss/ring")["ranks"]}
    assert ranks[ring_ranks.BAD_RANK]["parts"][0]["trigger_step"] == ring_ranks.BAD_STEP["loss"]
