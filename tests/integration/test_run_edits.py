"""Editing runs over REST, on a real server and both engines: what people say stays, whatever agents repeat."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gradiometer import wire
from gradiometer_server.api import schemas
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, scalar_schema


class Agent(WireClient):
    """A source whose run says more about itself; by default the launch of all other tests."""

    def __init__(self, made: Server, *, attempt: int = 1_800_000_000_000, **told: Any) -> None:
        super().__init__(made.url, "r 1/#", project="p", attempt=attempt)
        fields = {"run_id": self.run.run_id, "project": "p", "name": "first", "created_s": 1.0, **told}
        self.run = wire.RunInfo(**fields)


PATH = "/api/v1/runs/r%201%2F%23"
TOLD: dict[str, Any] = {
    "config": {"lr": 0.1, "model": {"depth": 2}},
    "tags": ("a", "b"),
    "notes": "n",
    "group": "g",
}


@pytest.fixture
def made(server: Callable[..., Server], database_url: str) -> Server:
    one = server(database_url)
    say(one, **TOLD)
    return one


def say(made: Server, *, attempt: int = 1_800_000_000_000, **told: Any) -> None:
    with Agent(made, attempt=attempt, **told) as agent:
        agent.hello()


def patch(made: Server, body: Any) -> httpx.Response:
    # Python's JSON, with bare NaN and Infinity, which httpx's own would refuse.
    headers = {"Content-Type": "application/json"}
    return httpx.patch(made.url + PATH, content=json.dumps(body), headers=headers, timeout=30)


def changed(made: Server, body: Any) -> dict[str, Any]:
    answer = patch(made, body)
    assert answer.status_code == 200, answer.text
    detail: dict[str, Any] = answer.json()
    schemas.RunDetail.model_validate(detail)
    return detail


def refused(made: Server, body: Any) -> dict[str, Any]:
    answer = patch(made, body)
    assert answer.status_code == 422, answer.text
    problem: dict[str, Any] = answer.json()
    assert problem["code"] == "invalid_request"
    assert problem["detail"]
    assert problem["remedy"]
    return problem


def test_every_field_is_changed_and_found_again(made: Server) -> None:
    detail = changed(
        made,
        {
            "name": "second",
            "tags": ["x", "a", "x"],
            "notes": "two\nlines",
            "group": "h",
            "config": {"lr": 0.2, "new": [1]},
        },
    )
    assert (detail["name"], detail["tags"], detail["notes"], detail["group"]) == (
        "second",
        ["x", "a"],
        "two\nlines",
        "h",
    )
    assert detail["config"] == {"lr": 0.2, "model": {"depth": 2}, "new": [1]}
    assert made.get("/runs", search="SECOND")["runs"][0]["tags"] == ["x", "a"]
    assert made.get("/runs", search="first")["runs"] == []
    assert changed(made, {"group": None})["group"] is None
    assert changed(made, {"remove_config_keys": ["model"]})["config"] == {"lr": 0.2, "new": [1]}


def test_r38_a_config_that_is_not_finite_leaves_list_and_detail_usable(made: Server) -> None:
    config = {
        "clip": math.nan,
        "bounds": {"low": -math.inf, "high": [1e308, math.inf, 5e-324]},
        "seed": 2**63,
    }
    detail = changed(made, {"config": config})
    shown = {
        "clip": "NaN",
        "bounds": {"low": "-Infinity", "high": [1e308, "Infinity", 5e-324]},
        "seed": 2**63,
    }
    assert detail["config"] == {**TOLD["config"], **shown}
    text = httpx.get(made.url + PATH).text
    strict = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert strict["config"] == detail["config"]
    assert len(made.get("/runs")["runs"]) == 1
    # What was answered can be sent back, and an agent that says the same NaN changes nothing.
    assert changed(made, {"config": detail["config"]})["config"] == detail["config"]


def test_words_that_agents_repeat_do_not_undo_an_edit_but_new_ones_count(made: Server) -> None:
    changed(made, {"tags": ["mine"], "notes": "", "group": "", "config": {"lr": 9.0, "extra": 1}})
    changed(made, {"config": {"lr": 10.0}, "remove_config_keys": ["model"]})
    for _ in range(2):
        say(made, **TOLD)
        detail = made.get("/runs/r%201%2F%23")
        assert detail["config"] == {"lr": 10.0, "extra": 1}
        assert (detail["tags"], detail["notes"], detail["group"]) == (["mine"], "", None)
    later = {**TOLD, "config": {"lr": 0.5, "model": {"depth": 2}}, "tags": ("a", "c")}
    say(made, attempt=1_800_000_000_001, **later)
    detail = made.get("/runs/r%201%2F%23")
    assert detail["config"] == {"lr": 0.5, "extra": 1}
    assert detail["tags"] == ["mine", "c"]


BAD: list[tuple[str, Any, str]] = [
    ("nothing", {}, "body"),
    ("misspelt", {"tag": []}, "body.tag"),
    ("no object", [1], "body"),
    ("empty name", {"name": ""}, "body.name"),
    ("a name of two lines", {"name": "a\nb"}, "body.name"),
    ("a long name", {"name": "x" * 501}, "body.name"),
    ("a tag that is no text", {"tags": [1]}, "body.tags.0"),
    ("a tag with NUL", {"tags": ["ok", "a\0"]}, "body.tags.1"),
    ("too many tags", {"tags": [str(n) for n in range(257)]}, "body.tags"),
    ("long notes", {"notes": "x" * 65_537}, "body.notes"),
    ("a long group", {"group": "x" * 501}, "body.group"),
    ("a config that is no object", {"config": [1]}, "body.config"),
    ("a huge whole number", {"config": {"n": 2**64}}, "body.config"),
    ("half a character", {"config": {"n": "\ud800"}}, "body.config"),
    ("half a character in notes", {"notes": "two\nlines \ud800"}, "body.notes"),
    ("a key that is not there", {"remove_config_keys": ["none"]}, "body.remove_config_keys"),
]


def test_what_cannot_be_kept_is_named(server: Callable[..., Server]) -> None:
    made = server()
    say(made, **TOLD)
    before = made.get("/runs/r%201%2F%23")
    for what, body, field in BAD:
        assert refused(made, body)["field"] == field, what
    deep: Any = 1
    for _ in range(40):
        deep = {"x": deep}
    assert "nested" in refused(made, {"config": deep})["detail"]
    bottomless = '{"config":' + '{"x":' * 100_000 + "1" + "}" * 100_001
    assert httpx.patch(made.url + PATH, content=bottomless).status_code in (400, 422)
    after = made.get("/runs/r%201%2F%23")
    assert after == {**before, "updated_s": after["updated_s"]}


def test_a_large_config_is_refused_as_a_whole(made: Server) -> None:
    half = "x" * 600_000
    changed(made, {"config": {"one": half}})
    assert "bytes" in refused(made, {"config": {"two": half}})["detail"]
    assert "two" not in made.get("/runs/r%201%2F%23")["config"]


def test_a_run_that_is_not_there(made: Server) -> None:
    answer = httpx.patch(f"{made.url}/api/v1/runs/none", json={"name": "x"})
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_points_go_on_while_it_is_edited(made: Server) -> None:
    with Agent(made, attempt=1_800_000_000_002, **TOLD) as agent:
        agent.hello()
        agent.send(scalar_schema("loss"))
        for step in range(1, 21):
            agent.post(frame({step: [1.0]}))
            changed(made, {"config": {"round": step}, "tags": [f"t{step}"]})
        agent.send(exit_event(0))
    detail = made.get("/runs/r%201%2F%23")
    assert detail["config"]["round"] == 20
    assert detail["tags"] == ["t20"]
