"""Histograms of a real training on two ranks, through a real server: on demand, from user code, and on alert."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gradiometer_server.api import schemas
from tests.integration import histogram_ranks
from tests.support.eventually import eventually
from tests.support.server import Server

ROOT = Path(__file__).resolve().parents[2]
PATH = "/runs/two/histograms"
WORLD_SIZE = 2


def start(one: Server, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(Path(histogram_ranks.__file__)), str(out)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "GRADIOMETER_URL": one.url,
        "GRADIOMETER_RUN_ID": "two",
        "GRADIOMETER_LINGER_S": "30",
    }
    with (out / "log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)


def listed(one: Server, reason: str) -> list[dict[str, Any]]:
    """Steps with this reason that both ranks sent."""
    found = one.get(PATH)
    schemas.HistogramOverview.model_validate(found)
    both = [step for step in found["histograms"] if step["ranks"] == [0, 1]]
    return [step for step in both if any(reason in said for said in step["reasons"])]


def ask(one: Server, run: str = "two", **body: Any) -> httpx.Response:
    return httpx.post(f"{one.url}/api/v1/runs/{run}/commands", json={"kind": "histogram", **body}, timeout=10)


def assert_equal_to_the_full_gradient(one: Server, step: int, bins: dict[str, list[int]]) -> None:
    found = one.get(f"{PATH}/layers", step=step)
    schemas.LayerHistograms.model_validate(found)
    assert [layer["name"] for layer in found["layers"]] == list(bins)
    for layer in found["layers"]:
        assert layer["counts"] == bins[layer["name"]], (step, layer["name"])
        assert layer["counted"] == layer["numel"] == sum(layer["counts"])
    per_rank = [one.get(f"{PATH}/layers", step=step, rank=rank)["layers"] for rank in range(WORLD_SIZE)]
    for layer, *own in zip(found["layers"], *per_rank, strict=True):
        assert np.sum([rank["counts"] for rank in own], axis=0).tolist() == layer["counts"]
        assert all(0 < rank["counted"] < layer["numel"] for rank in own)


@pytest.mark.slow
def test_counts_of_two_fsdp_ranks_add_up_to_those_of_the_full_gradient(
    server: Callable[..., Server], spool: Path, tmp_path: Path
) -> None:
    one = server()
    assert ask(one).status_code == 404
    process = start(one, tmp_path)
    try:
        eventually(lambda: bool(listed(one, "step five")), 90, what="what the training asked for arrives")
        answer = ask(one, reason="a look")
        assert answer.status_code == 202, answer.text
        asked = answer.json()
        schemas.CommandAnswer.model_validate(asked)
        assert (asked["asked"], asked["ranks"]) == (2, [0, 1])
        assert asked["step"] > 5
        eventually(lambda: bool(listed(one, "a look")), 60, what="what was asked over REST arrives")
        only = ask(one, rank=1, reason="only one").json()
        assert only["ranks"] == [1]
        assert ask(one, rank=7).json()["code"] == "no_agent"
        # The alert that the NaN opens asks all ranks for one and the same step.
        (tmp_path / "spoil").touch()
        eventually(lambda: bool(listed(one, "alert non_finite")), 60, what="what the alert asked for arrives")
        (tmp_path / "stop").touch()
        assert process.wait(60) == 0, (tmp_path / "log").read_text()[-4000:]
    finally:
        process.kill()
        process.wait()
    for rank in range(WORLD_SIZE):
        said = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert said == {"failures": {}, "dropped": {}}
    eventually(lambda: one.get("/runs/two")["state"] == "finished", 60)
    full = json.loads((tmp_path / "full.json").read_text())
    spoiled_at = full["spoiled_at"]

    assert [step["step"] for step in listed(one, "step five")] == [5]
    assert [step["step"] for step in listed(one, "a look")] == [asked["step"]]
    after = listed(one, "is not finite")
    assert spoiled_at + 1 in [step["step"] for step in after], "the first step that is bad on both ranks"
    (on_alert,) = listed(one, "alert non_finite")
    assert on_alert["step"] > spoiled_at + 1
    both = [step["step"] for step in one.get(PATH)["histograms"] if step["ranks"] == [0, 1]]
    assert len(both) >= 4
    for step in both:
        assert_equal_to_the_full_gradient(one, step, full["bins"][str(step)])

    # The step itself is only with the rank that saw it go bad, and says so.
    bad = one.get(f"{PATH}/layers", step=spoiled_at, layer=histogram_ranks.BAD_LAYER)
    assert bad["ranks"] == [histogram_ranks.BAD_RANK]
    assert (bad["reasons"], bad["trigger_steps"]) == (["a gradient is not finite"], [spoiled_at])
    (layer,) = bad["layers"]
    assert layer["counts"][255] == 1
    assert layer["counted"] < layer["numel"]
    (of_one,) = [step for step in one.get(PATH)["histograms"] if "only one" in step["reasons"]]
    assert of_one["ranks"] == [1]

    late = ask(one)
    assert (late.status_code, late.json()["code"]) == (409, "run_ended")
    for wrong in ({"step": 10**9}, {"step": 5, "layer": "no such"}, {"step": 5, "rank": 9}):
        assert httpx.get(f"{one.url}/api/v1{PATH}/layers", params=wrong).status_code == 404
