"""What metrics come to, as `run.define_metric` said: from a real agent, over real connections, on both engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradiometer as gm
from gradiometer import wire
from gradiometer_server.api.summaries import RunSummary
from gradiometer_server.store.definitions import Definition, definition_for
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, scalar_schema

LOSSES = [3.0, 1.0, math.nan, 2.0]


def summary(made: Server, run_id: str) -> dict[str, dict[str, Any]]:
    found = made.get(f"/runs/{run_id}/summary")
    RunSummary.model_validate(found)
    return {metric["name"]: metric for metric in found["metrics"]}


def define(name: str, summary: str, goal: str | None = None, step_metric: str | None = None) -> bytes:
    attributes = {"name": name, "summary": summary, "goal": goal, "step_metric": step_metric}
    return wire.encode(wire.Event(kind="metric", time=1.0, attributes=attributes))


def test_a_real_agent_defines_its_metrics(
    server: Callable[..., Server], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = server()
    monkeypatch.setenv("GRADIOMETER_URL", made.url)
    run = gm.init("p", "n")
    run.define_metric("val/*", "min", step_metric="epoch")
    run.define_metric("val/acc", summary="best", goal="max")
    run.define_metric("train/loss", "mean")
    run.define_metric("nobody", "median")
    run.define_metric("", "min")
    run.define_metric("val/loss", "best")
    for step, loss in enumerate(LOSSES, 1):
        run.log(
            {"train/loss": loss, "val/loss": loss, "val/acc": 1.0 - loss, "epoch": step, "other": step},
            step=step,
        )
    assert run.dropped == {"a definition of a metric is not valid": 3}
    run.finish()
    eventually(lambda: made.get(f"/runs/{run.id}")["state"] == "finished", 30)
    found = summary(made, run.id)
    assert (found["val/loss"]["value"], found["val/loss"]["goal"], found["val/loss"]["step_metric"]) == (
        1.0, "minimize", "epoch",
    )  # fmt: skip
    acc = found["val/acc"]
    assert (acc["summary"], acc["value"], acc["best"], acc["last"], acc["min"]) == (
        "best",
        0.0,
        0.0,
        -1.0,
        -2.0,
    )
    assert (
        found["train/loss"]["value"],
        found["train/loss"]["mean"],
        found["train/loss"]["num_nonfinite"],
    ) == (2.0, 2.0, 1)
    other = found["other"]
    assert (other["summary"], other["value"], other["goal"], other["best"], other["mean"]) == (
        "last",
        4.0,
        None,
        None,
        None,
    )
    assert found["val/loss"]["num_points"] == 4
    # A mean takes reading the points, so lists leave it out.
    assert made.get(f"/runs/{run.id}")["summary"] == {"val/loss": 1.0, "val/acc": 0.0}
    (listed,) = made.get("/runs", metrics=["val/loss", "other", "train/loss"])["runs"]
    assert listed["summary"] == {"val/loss": 1.0}
    # Unasked, a list has what was defined by name: a pattern may mean thousands.
    assert made.get("/runs")["runs"][0]["summary"] == {"val/acc": 0.0}
    assert made.get("/runs", metrics="train/loss")["runs"][0]["summary"] == {}


def test_a_list_has_the_first_definitions_of_each_run(server: Callable[..., Server]) -> None:
    made = server()
    names = [f"m/{n:02}" for n in range(30)]
    for run_id, offset in (("a", 0.0), ("b", 100.0)):
        with WireClient(made.url, run_id) as agent:
            agent.hello()
            agent.send(*(define(name, "max") for name in (names if run_id == "a" else names[25:])))
            agent.send(define("m/*", "min"), scalar_schema(*names))
            agent.send(frame({1: [offset + n for n in range(30)]}))
    expected = {
        "a": {name: float(n) for n, name in enumerate(names[:20])},
        "b": {name: 100.0 + n for n, name in enumerate(names[25:], 25)},
    }
    eventually(lambda: {run["id"]: run["summary"] for run in made.get("/runs")["runs"]} == expected, 20)


def test_definitions_come_late_are_replaced_and_survive_a_restart(
    server: Callable[..., Server], database_url: str
) -> None:
    made = server(database_url)
    with WireClient(made.url, "r") as agent:
        agent.hello()
        agent.send(define("loss", "last"), scalar_schema("loss", "norm"))
        agent.send(frame({step: [value, -value] for step, value in enumerate(LOSSES, 1)}))
        # Points that are not in a chunk yet count.
        eventually(lambda: summary(made, "r").get("loss", {}).get("num_points") == 4, 20)
        assert summary(made, "r")["loss"]["value"] == 2.0
        agent.send(define("loss", "max"), define("n*", "best", "maximize"))
        eventually(lambda: summary(made, "r")["loss"]["value"] == 3.0, 20)
        made.kill()
        made.start()
    assert summary(made, "r")["norm"]["value"] == -1.0
    with WireClient(made.url, "r") as agent:
        agent.hello()
        agent.send(define("loss", "median"), define("loss", "best"), define("x\n", "last"))
        rejected = agent.send(
            wire.encode(wire.Event(kind="metric", time=1.0, attributes={"name": 1, "summary": "min"}))
        )
        assert [one.code for one in rejected.rejected] == ["invalid_event"]
        agent.send(exit_event(0))
    eventually(lambda: made.get("/runs/r")["rejected_records"] >= 3, 20)
    assert summary(made, "r")["loss"]["summary"] == "max"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b", "a/b"), ("a/c", "a/*"), ("a/bc", "a/b*"), ("z", None), ("x[1]", "x[*]"), ("x1", None), ("q?", "q?"),
        ("qa", None), ("a/b/c/d", "a/b*"), ("A/b", None),
    ],
)  # fmt: skip
def test_the_closest_definition_counts(name: str, expected: str | None) -> None:
    names = ("a/*", "a/b", "a/b*", "x[*]", "q?")
    known = [Definition(name=one, summary="last", goal=None, step_metric=None) for one in names]
    found = definition_for(known, name)
    assert (None if found is None else found.name) == expected
