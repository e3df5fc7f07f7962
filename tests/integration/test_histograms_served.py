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

from gradiometer import wire
from gradiometer_server.api import schemas
from tests.integration import histogram_ranks
from tests.support.eventually import eventually
from tests.support.paths import PYTHONPATH
from tests.support.server import Server
from tests.support.wire_client import WireClient, layer_schema

PATH = "/runs/two/histograms"
WORLD_SIZE = 2


def start(one: Server, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(Path(histogram_ranks.__file__)), str(out)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
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


def record(rows: dict[int, Any], *, reason: str, about: int | None = None, schema_id: int = 1) -> bytes:
    """Histograms of steps: per layer, bin -> count."""
    counts = np.zeros((len(rows), 2, wire.HISTOGRAM_BINS), dtype="<u4")
    for at, layers in enumerate(rows.values()):
        for row, bins in enumerate(layers):
            for place, count in bins.items():
                counts[at, row, place] = count
    detail = wire.Detail(
        kind="histogram", reason=reason, trigger_step=about, schema_id=schema_id, steps=tuple(rows),
        times=tuple(1.8e9 + step for step in rows), values=counts.tobytes(),
    )  # fmt: skip
    return wire.encode(detail)


def test_histograms_are_kept_by_rank_and_merged_when_they_are_read(
    server: Callable[..., Server], database_url: str
) -> None:
    one = server(database_url)
    for rank in (0, 1):
        with WireClient(one.url, "two", rank=rank, world_size=2) as client:
            client.hello()
            layers = layer_schema(("a", 4), ("b", 3), schema_id=1)
            sent = [record({5: [{100: 3 + rank, 255: 1}, {0: 3}]}, reason="look", about=4)]
            if rank == 1:
                sent.append(record({9: [{}, {0: 1}], 12: [{1: 2}, {}]}, reason="alone"))
                sent.append(record({9: [{}, {}]}, reason="x", schema_id=3))
            ack = client.send(layers, *sent)
            assert [refused.code for refused in ack.rejected] == ["unknown_schema"] * rank
    eventually(lambda: len(one.get(PATH)["histograms"]) == 3, 20)
    one.kill()
    one.restart()
    found = one.get(PATH)
    schemas.HistogramOverview.model_validate(found)
    alone = {"attempt": 1, "ranks": [1], "reasons": ["alone"], "trigger_steps": []}
    both = {"attempt": 1, "step": 5, "ranks": [0, 1], "reasons": ["look"], "trigger_steps": [4]}
    assert found["histograms"] == [{**alone, "step": 12}, {**alone, "step": 9}, both]
    assert one.get(PATH, limit=1)["histograms"] == [{**alone, "step": 12}]
    newest = one.get(f"{PATH}/layers")
    schemas.LayerHistograms.model_validate(newest)
    assert (newest["step"], [layer["counted"] for layer in newest["layers"]]) == (12, [2, 0])
    assert newest["layers"][0]["counts"][:3] == [0, 2, 0]
    # The client's layers are whole on both ranks: copies, of which one counts.
    at_five = one.get(f"{PATH}/layers", step=5, layer="a")
    (layer,) = at_five["layers"]
    assert (layer["counts"][100], layer["counts"][255], layer["counted"], layer["numel"]) == (3, 1, 4, 4)
    (of_rank,) = one.get(f"{PATH}/layers", step=5, layer="a", rank=1)["layers"]
    assert of_rank["counts"][100] == 4
    assert one.get("/runs/two/ring") == {"ranks": []}
    nowhere = httpx.get(f"{one.url}/api/v1{PATH}/layers", params={"step": 6})
    assert (nowhere.status_code, nowhere.json()["code"]) == (404, "not_found")


def test_commands_are_for_agents_that_are_there_and_understand_them(server: Callable[..., Server]) -> None:
    one = server()
    assert ask(one).status_code == 404
    with WireClient(one.url, "two", world_size=2) as client:
        client.hello()
        old = ask(one)
        assert (old.status_code, old.json()["code"]) == (409, "no_agent")
        assert "connected" in old.json()["detail"]
        assert old.json()["remedy"]
        kinds = ("ring", "histogram")
        hello = wire.Hello(
            protocol=1, agent_version="test", run=client.run, sources=(client.source,), commands=kinds
        )
        client.send_raw(wire.encode(hello))
        client.receive()
        answer = eventually(lambda: (found := ask(one, reason="a look")).status_code == 202 and found, 10)
        body = answer.json()
        assert body == {"id": body["id"], "kind": "histogram", "asked": 1, "ranks": [0], "step": None}
        command = client.receive(10)
        assert isinstance(command, wire.Command)
        assert (command.id, command.kind, command.reason) == (body["id"], "histogram", "a look")
        for wrong in ({"kind": "dump"}, {"rank": -1}, {"reason": "x" * 201}, {"more": 1}):
            assert ask(one, **wrong).status_code == 422, wrong
        foreign = httpx.post(
            f"{one.url}/api/v1/runs/two/commands",
            json={"kind": "histogram"},
            headers={"Origin": "https://elsewhere.example"},
        )
        assert (foreign.status_code, foreign.json()["code"]) == (403, "origin_not_allowed")
    described = httpx.get(f"{one.url}/openapi.json").json()["paths"]
    assert "202" in described["/api/v1/runs/{run}/commands"]["post"]["responses"]
    assert "/api/v1/runs/{run}/histograms/layers" in described


@pytest.mark.slow
def test_counts_of_two_fsdp_ranks_add_up_to_those_of_the_full_gradient(
    server: Callable[..., Server], spool: Path, tmp_path: Path
) -> None:
    one = server()
    assert ask(one).status_code == 404
    process = start(one, tmp_path)
    try:
        eventually(lambda: bool(listed(one, "step five")), 90, what="what the training asked for arrives")
        eventually(lambda: one.get("/runs/two")["latest"].get("time/step_s"), 30, what="steps are merged")
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
