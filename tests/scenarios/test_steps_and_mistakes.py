"""Scenarios R30, R32, R33: what others throw away because of a step, and what becomes of a mistake."""

from __future__ import annotations

import logging

import msgspec
import pytest

import gradiometer as gm
from gradiometer import wire
from tests.scenarios.asking import ask, ended, metrics, points
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, scalar_schema


def test_R30_a_call_without_a_step_costs_no_later_call_its_points(agent: Server) -> None:
    with gm.init(run_id="mixed") as run:
        for index in range(50):
            run.log({"a": float(index)})
            run.log({"b": float(index)}, step=index + 1)
        assert run.dropped == {}
    shown = ended(agent, "mixed")
    assert points(agent, "mixed", "b") == [(index + 1, float(index)) for index in range(50)]
    # The documented rule: without `watch`, a call without a step is the step after the largest so far.
    assert [value for _, value in points(agent, "mixed", "a")] == [float(index) for index in range(50)]
    assert (shown["rejected_records"], shown["dropped_reports"]) == (0, 0)


def test_R30_a_step_that_is_named_again_and_again_keeps_its_last_value(agent: Server) -> None:
    with gm.init(run_id="again") as run:
        for index in range(50):
            run.log({"a": float(index)})
            run.log({"b": float(index)}, step=1)
        assert run.dropped == {}
    ended(agent, "again")
    assert points(agent, "again", "b") == [(1, 49.0)]
    assert len(points(agent, "again", "a")) == 50


@pytest.mark.parametrize("order", ["inference first", "training first", "in turns"])
def test_R32_two_counters_in_one_run_do_not_disturb_each_other(agent: Server, order: str) -> None:
    a, b = [("A", step) for step in range(8074)], [("B", step) for step in range(101)]
    calls = {"inference first": a + b, "training first": b + a, "in turns": sorted(a + b, key=lambda c: c[1])}
    run_id = f"counters-{order[0]}{order[-1]}"
    with gm.init(run_id=run_id) as run:
        for name, step in calls[order]:
            run.log({name: step / 8}, step=step)
    shown = ended(agent, run_id)
    assert points(agent, run_id, "A") == [(step, step / 8) for step in range(8074)]
    assert points(agent, run_id, "B") == [(step, step / 8) for step in range(101)]
    assert shown["rejected_records"] == 0


def test_R33_mistakes_are_told_once_and_counted_where_everybody_sees_them(
    agent: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gradiometer"), gm.init(run_id="mistakes") as run:
        for index in range(4):
            run.log({"train/loss": "high"}, step=index)
        for index in range(3):
            run.log({"train/loss": 1.0}, step=-1 - index)
        for _ in range(3):
            run.log({"": 1.0}, step=1)
        run.log({"train/loss": 0.5}, step=1)
        told = dict(run.dropped)
    assert sorted(told.values()) == [3, 3, 4]
    warnings = [record.getMessage() for record in caplog.records if "dropped a report" in record.getMessage()]
    assert len(warnings) == 3, "one for each kind of mistake"
    for word in ("train/loss is a str", "-1", "name"):
        assert any(word in warning for warning in warnings), warnings
    assert ended(agent, "mistakes")["dropped_reports"] == 10
    assert points(agent, "mistakes", "train/loss") == [(1, 0.5)]


def test_R33_a_program_that_speaks_for_itself_is_told_what_was_refused_and_why(one: Server) -> None:
    bad = {
        "a step below 0": frame({-1: [1.0]}),
        "a step beyond what can be counted": frame({2**53: [1.0]}),
        "two values for one column": frame({2: [1.0, 2.0]}),
        "a schema that nobody declared": frame({3: [1.0]}, schema_id=9),
        "a schema with a nameless column": scalar_schema("", schema_id=3),
        "a schema with a name twice": scalar_schema("x", "x", schema_id=4),
        "a time that is none": frame({4: [1.0]}, time_s=float("nan")),
        "no step at all": frame({}),
        "no record at all": b"\xc1",
        "text where numbers belong": msgspec.msgpack.encode(
            {"type": "frame", "schema_id": 1, "steps": ["one"], "times": [0.0], "values": b""}
        ),
    }
    with WireClient(one.url, "refused") as client:
        client.hello()
        client.send(scalar_schema("train/loss"), frame({1: [0.5]}))
        ack = client.send(*bad.values())
        assert [refused.seq for refused in ack.rejected] == list(range(3, 13)), "each one, by its number"
        for what, refused in zip(bad, ack.rejected, strict=True):
            assert refused.code, what
            assert len(refused.message) > 20, f"{what}: {refused.message}"
        client.send(frame({5: [0.25]}), exit_event())
    assert ended(one, "refused")["rejected_records"] == 10
    assert points(one, "refused", "train/loss") == [(1, 0.5), (5, 0.25)]
    assert wire.name_problem("") in ack.rejected[4].message


NAMES = (
    "val/AR@100", "huber[delta=1.3]", "n:estimators", "损失/训练", "🔥 loss", "x" * 300, "../x", "..", ".",
    "<img src=x onerror=1>", "a b", "100%", "a?b#c&d=e", "'; DROP TABLE run; --", '"quoted"', "back\\slash", "%2F", "é",
    "e\u0301", "null", "constructor", "__proto__", "/", "a//b", "a/", "NaN", "{run}", "*", "_underscored",
)  # fmt: skip


def test_R52_any_name_comes_back_as_it_was_given(agent: Server) -> None:
    with gm.init(run_id="names") as run:
        run.log({name: float(place) for place, name in enumerate(NAMES)}, step=1)
        assert run.dropped == {}
    ended(agent, "names")
    shown = metrics(agent, "names")
    # A name that begins with an underscore is stored, and not listed.
    assert set(shown) == {name for name in NAMES if not name.startswith("_")}
    asked = {"series": [{"run": "names", "metric": name} for name in NAMES]}
    found = ask(agent, "POST", "/series/query", json=asked)["series"]
    assert [(one["metric"], one["points"]["mean"]) for one in found] == [
        (name, [float(place)]) for place, name in enumerate(NAMES)
    ]
    for place, name in enumerate(NAMES):
        by_path = ask(agent, "GET", "/runs/names/points", params={"metric": name})
        assert (by_path["metric"], by_path["points"]["value"]) == (name, [float(place)])
    latest = ask(agent, "GET", "/runs/names")["latest"]
    assert latest["val/AR@100"] == 0.0


@pytest.mark.parametrize(
    ("name", "why"),
    [("x" * 501, "501 characters"), ("a\nb", "U+000A"), ("a\x00b", "U+0000"), ("\ud800", "U+D800"), ("  ", "empty")],
)  # fmt: skip
def test_R52_a_name_that_cannot_be_is_refused_at_once_and_said(
    agent: Server, caplog: pytest.LogCaptureFixture, name: str, why: str
) -> None:
    run_id = f"refused-name-{len(name)}-{why[:3]}".replace(" ", "")
    with caplog.at_level(logging.WARNING, "gradiometer"), gm.init(run_id=run_id) as run:
        run.log({name: 1.0, "train/loss": 2.0}, step=1)
        assert sum(run.dropped.values()) == 1
    assert why in caplog.text
    ended(agent, run_id)
    assert points(agent, run_id, "train/loss") == [(1, 2.0)], "those beside it are kept"


def test_R53_names_that_look_alike_are_series_of_their_own(agent: Server) -> None:
    names = ("f1-score", "f1_score", "f1 score", "a/b", "a", "a.b", "A", "a/b/c")
    with gm.init(run_id="alike") as run:
        for step in range(3):
            run.log({name: place + step / 10 for place, name in enumerate(names)}, step=step)
    ended(agent, "alike")
    assert set(metrics(agent, "alike")) == set(names)
    for place, name in enumerate(names):
        expected = [place + step / 10 for step in range(3)]
        assert points(agent, "alike", name) == list(enumerate(expected))
        by_path = ask(agent, "GET", "/runs/alike/points", params={"metric": name})
        assert (by_path["metric"], by_path["points"]["value"]) == (name, expected)
