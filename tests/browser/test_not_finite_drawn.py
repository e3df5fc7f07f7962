"""Scenarios R41 and R43 on the page: what is not finite is drawn as what it is, and what is absent is not drawn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tests.browser.dashboard import trace, wait_for_step, whole_run
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, scalar_schema

pytestmark = pytest.mark.browser


def marks_of(page: Page, metric: str, number: int) -> list[tuple[int, str]]:
    """(step, text) of every mark, as soon as there are so many."""

    def complete() -> list[tuple[int, str]]:
        drawn = trace(page, metric, "non-finite") or {"x": [], "customdata": []}
        assert len(drawn["x"]) == number, drawn
        return list(zip(drawn["x"], drawn["customdata"], strict=True))

    return eventually(complete, 20, what=f"{number} marks are drawn")


def test_R41_forty_nan_of_fifty_points_are_forty_marks(server: Callable[..., Server], page: Page) -> None:
    one = server()
    whole_run(one.url, "mostly-nan", ["train/loss"], 50, lambda _, step: math.nan if step % 5 else 1.0)
    page.goto(f"{one.url}/runs/mostly-nan")
    assert marks_of(page, "train/loss", 40) == [(step, "1 NaN") for step in range(1, 51) if step % 5]
    line = trace(page, "train/loss", "mean")
    assert line is not None
    drawn = {x: y for x, y in zip(line["x"], line["y"], strict=True) if y is not None}
    assert drawn == dict.fromkeys(range(5, 51, 5), 1.0), "and no line is drawn through them"


def test_R43_absent_infinite_nan_and_zero_are_four_pictures(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    with WireClient(one.url, "outcomes") as client:
        client.hello()
        client.send(scalar_schema("norm"), scalar_schema("train/loss", schema_id=2))
        client.send(frame({1: [0.5], 3: [math.inf], 4: [math.nan], 5: [0.0]}))
        client.send(frame({step: [1.0] for step in range(1, 6)}, schema_id=2), exit_event())
    page.goto(f"{one.url}/runs/outcomes")
    wait_for_step(page, "norm", 5)
    marks = marks_of(page, "norm", 2)
    assert [step for step, _ in marks] == [3, 4]
    assert "NaN" in marks[1][1]
    assert "NaN" not in marks[0][1]
    line = trace(page, "norm", "mean")
    assert line is not None
    drawn = {x: y for x, y in zip(line["x"], line["y"], strict=True) if y is not None}
    assert drawn == {1: 0.5, 5: 0.0}, (
        "nothing stands for the step that is absent, nor a 0 for what is not finite"
    )
