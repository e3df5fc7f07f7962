"""A one-step spike and a single NaN in 200,000 steps are on the chart at every zoom level (acceptance 7)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tests.browser.dashboard import layout, trace, visible_values, whole_run
from tests.support.eventually import eventually
from tests.support.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LAST = 200_000
SPIKE_STEP, SPIKE = 123_457, 9.5
NAN_STEP = 60_001


def value(name: str, step: int) -> float:
    if step == SPIKE_STEP:
        return SPIKE
    if step == NAN_STEP:
        return math.nan
    return 1.0 + (step * 7919 % 1000) / 10_000


def test_the_spike_and_the_nan_are_drawn_in_the_first_view_and_at_every_zoom(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    whole_run(one.url, "long", ["train/loss"], LAST, value)
    page.goto(f"{one.url}/runs/long")
    assert_spike_and_nan_drawn(page, width=LAST)
    for half in (50_000, 10_000, 1_000, 200, 20):
        page.goto(f"{one.url}/runs/long?from={SPIKE_STEP - half}&to={SPIKE_STEP + half}")
        assert_spike_drawn(page, half)
        page.goto(f"{one.url}/runs/long?from={max(1, NAN_STEP - half)}&to={NAN_STEP + half}")
        assert_nan_drawn(page, 2 * half)


def assert_spike_and_nan_drawn(page: Page, width: int) -> None:
    assert_spike_drawn(page, width)
    assert_nan_drawn(page, width)


def assert_spike_drawn(page: Page, half: int) -> None:
    """The exact value is on an edge of the band (or on the line, one point a step), and inside both ranges."""

    def spike_step() -> bool:
        steps: list[int] = []
        for name in ("band", "mean"):
            drawn = trace(page, "train/loss", name) or {"x": [], "y": []}
            steps += [x for x, y in zip(drawn["x"], drawn["y"], strict=True) if y == SPIKE]
        ranges = layout(page, "train/loss")
        assert ranges["yRange"][0] < SPIKE < ranges["yRange"][1]
        assert ranges["range"][0] <= SPIKE_STEP <= ranges["range"][1]
        assert steps, "no trace holds the spike's value"
        # First step of its bucket; before the zoomed answer comes, the whole run's buckets are drawn.
        return steps[0] <= SPIKE_STEP < steps[0] + max(1, 2 * half / 100)

    eventually(spike_step, 20, what=f"the spike is drawn in a view of ±{half} steps")


def assert_nan_drawn(page: Page, width: int) -> None:
    """One mark, for one NaN, in the bucket of its step; the line around it stays finite."""

    def mark() -> bool:
        marks = trace(page, "train/loss", "non-finite")
        assert marks is not None
        assert marks["customdata"] == ["1 NaN"]
        (step,) = marks["x"]
        return step <= NAN_STEP < step + max(1, width / 100)

    eventually(mark, 20, what=f"the NaN is marked in a view of {width} steps")
    assert max(visible_values(trace(page, "train/loss", "mean"))) <= SPIKE
