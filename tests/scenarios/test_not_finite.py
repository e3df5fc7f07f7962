"""Scenarios R38, R40, R41, R43, R44: NaN, infinities and absence stay apart; a spike is in every picture."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx

import gradiometer as gm
from tests.scenarios.asking import Watcher, ask, ended, metrics, points, series, strict
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, scalar_schema

ODD = {"nan": math.nan, "up": math.inf, "down": -math.inf, "fine": 1.0}
SAID = {"nan": "NaN", "up": "Infinity", "down": "-Infinity", "fine": 1.0}


def test_R38_a_config_that_is_not_finite_breaks_no_page(agent: Server) -> None:
    with gm.init(run_id="odd-config", config={**ODD, "nested": {"list": [math.nan, 1]}}) as run:
        run.log({"train/loss": 1.0}, step=1)
    ended(agent, "odd-config")
    assert ask(agent, "GET", "/runs/odd-config")["config"] == {**SAID, "nested": {"list": ["NaN", 1]}}
    # As words, the way Python writes them, and as the strings that the server answers with.
    for body in (json.dumps({"config": {"later": ODD}}), json.dumps({"config": {"later": SAID}})):
        answer = httpx.patch(
            f"{agent.url}/api/v1/runs/odd-config", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200, answer.text
        assert strict(answer.content)["config"]["later"] == SAID
        assert ask(agent, "GET", "/runs/odd-config")["config"]["later"] == SAID
    assert "odd-config" in [run["id"] for run in ask(agent, "GET", "/runs")["runs"]]
    # What is no JSON in any reading is refused with a text, and changes nothing.
    refused = httpx.patch(f"{agent.url}/api/v1/runs/odd-config", content='{"config": {"later": nan}}')
    assert refused.status_code == 422
    assert strict(refused.content)["detail"]
    assert ask(agent, "GET", "/runs/odd-config")["config"]["later"] == SAID


def test_R40_the_three_kinds_come_through_rest_and_websocket_as_valid_json(one: Server) -> None:
    rows = {step: list(ODD.values()) for step in (1, 2)}
    with Watcher(one, "odd-values") as watcher, WireClient(one.url, "odd-values") as client:
        client.hello()
        client.send(scalar_schema(*ODD), frame(rows))
        live: dict[str, Any] = {}
        while len(live) < len(ODD):
            message = watcher.next("points")
            live |= {each["metric"]: each["values"] for each in message["series"]}
        client.send(exit_event())
    assert {name: live[name] for name in ODD} == {name: [value, value] for name, value in SAID.items()}
    shown = ended(one, "odd-values")
    assert {name: shown["latest"][name] for name in ODD} == SAID
    assert {name: metrics(one, "odd-values")[name]["last"] for name in ODD} == SAID
    for name, kind in (("nan", "nan"), ("up", "pos_inf"), ("down", "neg_inf"), ("fine", "count")):
        for buckets in (1, 5000):
            found = series(one, "odd-values", name, buckets=buckets)["points"]
            counts = {each: sum(found[each]) for each in ("count", "nan", "pos_inf", "neg_inf")}
            assert counts == {"count": 0, "nan": 0, "pos_inf": 0, "neg_inf": 0, kind: 2}
    assert "odd-values" in [run["id"] for run in ask(one, "GET", "/runs")["runs"]]


def test_R41_forty_nan_of_fifty_are_forty_marks(agent: Server) -> None:
    with gm.init(run_id="mostly-nan") as run:
        for step in range(50):
            run.log({"train/loss": math.nan if step % 5 else 1.0}, step=step)
    ended(agent, "mostly-nan")
    found = series(agent, "mostly-nan", "train/loss")["points"]
    assert found["step"] == list(range(50)), "no step is left out"
    assert [step for step, count in zip(found["step"], found["nan"], strict=True) if count] == [
        step for step in range(50) if step % 5
    ]
    assert metrics(agent, "mostly-nan")["train/loss"]["num_nonfinite"] == 40
    assert metrics(agent, "mostly-nan")["train/loss"]["num_points"] == 50
    # However few buckets: the counts add up.
    for buckets in (1, 7):
        few = series(agent, "mostly-nan", "train/loss", buckets=buckets)["points"]
        assert (sum(few["nan"]), sum(few["count"])) == (40, 10)


def test_R43_five_outcomes_of_a_norm_are_five_answers(agent: Server) -> None:
    values = [0.5, None, math.inf, math.nan, 0.0]
    with gm.init(run_id="outcomes") as run:
        for step, value in enumerate(values):
            run.log({"norm": value, "train/loss": 1.0}, step=step)
    ended(agent, "outcomes")
    found = series(agent, "outcomes", "norm")["points"]
    assert found["step"] == [0, 2, 3, 4], "None is absent: no point, and no 0"
    assert found["mean"] == [0.5, None, None, 0.0]
    assert (found["pos_inf"], found["nan"]) == ([0, 1, 0, 0], [0, 0, 1, 0])
    assert found["count"] == [1, 0, 0, 1]
    shown = metrics(agent, "outcomes")["norm"]
    assert (shown["num_points"], shown["num_nonfinite"], shown["min"], shown["max"]) == (4, 2, 0.0, 0.5)
    assert ended(agent, "outcomes")["latest"]["norm"] == 0.0
    assert len(points(agent, "outcomes", "train/loss")) == 5


NUM_POINTS, SPIKE_STEP, SPIKE = 100_000, 61_803, 50.0
APPEND = 10_000


def test_R44_a_spike_is_in_the_picture_at_every_zoom_and_after_every_append(one: Server) -> None:
    with WireClient(one.url, "spike") as client:
        client.hello()
        client.send(scalar_schema("train/loss"))
        edges: set[int] = set()
        for first in range(0, NUM_POINTS, APPEND):
            steps = range(first, first + APPEND)
            client.send(frame({step: [SPIKE if step == SPIKE_STEP else 1.0] for step in steps}))
            found = whole(one, first + APPEND)
            if first + APPEND > SPIKE_STEP:
                assert_spike(found)
                edges.add(found["bucket_width"])
        client.send(exit_event())
    ended(one, "spike")
    assert len(edges) == 1, "the picture does not change while the run grows within one bucket width"
    assert_spike(whole(one, NUM_POINTS))
    for half in (40_000, 9_999, 3_000, 500, 64, 7, 1, 0):
        for shift in (-half // 2, 0, half // 2):
            limits = {"from": max(0, SPIKE_STEP - half + shift), "to": SPIKE_STEP + half + shift}
            for buckets in (1000, 10, 1):
                assert_spike(series(one, "spike", "train/loss", buckets=buckets, **limits))


def whole(one: Server, num_points: int) -> dict[str, Any]:
    """The whole line at 1,000 pixels, as soon as all points are in it."""

    def complete() -> dict[str, Any] | None:
        found = series(one, "spike", "train/loss", buckets=1000)
        return found if sum(found["points"]["count"]) == num_points else None

    return eventually(complete, 30, what=f"{num_points} points are shown")


def assert_spike(found: dict[str, Any]) -> None:
    """It is the maximum of its own bucket, and of no other."""
    width, drawn = found["bucket_width"], found["points"]
    spiked = [step // width for step, high in zip(drawn["step"], drawn["max"], strict=True) if high == SPIKE]
    assert spiked == [SPIKE_STEP // width]
    assert sorted(set(drawn["max"])) in ([1.0, SPIKE], [SPIKE])
    assert set(drawn["min"]) <= {1.0, SPIKE}
