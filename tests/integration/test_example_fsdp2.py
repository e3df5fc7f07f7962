"""The FSDP2 example under torchrun on two ranks, with a real server: one run, and the norm of the whole gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.test_documentation import ROOT, finished_run, run_program
from tests.support.server import Server

STEPS = 100
METRICS = ("train/loss", "grad/norm", "grad/clip_norm", "grad/coverage_fraction")


def test_the_fsdp2_example_shows_one_whole_gradient_of_two_ranks(
    server: Callable[..., Server], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = server()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run_program([*launcher, str(ROOT / "examples" / "fsdp2_torchrun.py")], running, monkeypatch)
    run = finished_run(running, "examples")
    assert run["last_step"] == STEPS
    assert running.get(f"/runs/{run['id']}/alerts")["alerts"] == []
    detail = running.get(f"/runs/{run['id']}")
    assert sorted(source["rank"] for source in detail["sources"]) == [0, 1]
    assert "embedding.weight" in str(detail), "layers have the plain model's names"
    query = {"series": [{"run": run["id"], "metric": metric} for metric in METRICS]}
    points = {one["metric"]: one["points"] for one in running.post("/series/query", query)["series"]}
    assert {metric: sum(found["count"]) for metric, found in points.items()} == dict.fromkeys(METRICS, STEPS)
    assert set(points["grad/coverage_fraction"]["mean"]) == {1.0}
    # torch's own norm of all shards, which it computes with a collective.
    assert points["grad/norm"]["mean"] == pytest.approx(points["grad/clip_norm"]["mean"], rel=1e-5)
    assert points["train/loss"]["mean"][-1] < 0.5 * points["train/loss"]["mean"][0]
