"""The run page while the run trains: points, new metrics, alerts, reconnects. Data comes over the real wire."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import FloatRect, Page, expect

from tests.browser.dashboard import (
    begin_run,
    drawn_step,
    layer_frame,
    layout,
    send_scalars,
    trace,
    wait_for_step,
    whole_run,
)
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, frame, scalar_schema

pytestmark = pytest.mark.browser

NAMES = ("train/loss", "train/lr", "grad/norm")


def smooth(name: str, step: int) -> float:
    return 2.0 + math.sin(step / 50) * 0.1 if name == "train/loss" else 0.5


def test_points_are_drawn_while_they_arrive(server: Callable[..., Server], page: Page) -> None:
    one = server()
    with begin_run(one.url, "live", NAMES) as client:
        send_scalars(client, NAMES, 1, 50, smooth)
        page.goto(f"{one.url}/runs/live")
        wait_for_step(page, "train/loss", 50)
        first = drawn_step(page, "train/loss")
        for start in range(51, 151, 10):
            send_scalars(client, NAMES, start, start + 9, smooth)
        wait_for_step(page, "train/loss", 150)
        drawn = trace(page, "train/loss", "mean")
    assert drawn is not None
    assert first < drawn_step(page, "train/loss")
    assert drawn["x"] == list(range(1, 151))
    assert drawn["y"] == pytest.approx([smooth("train/loss", step) for step in range(1, 151)])
    card = page.locator("figure[data-metric='train/loss']")
    expect(card).to_have_attribute("data-last-step", "150")
    assert float(card.get_attribute("data-last-value") or "nan") == pytest.approx(smooth("train/loss", 150))


def test_a_metric_that_appears_while_the_page_is_open_gets_its_chart(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    with begin_run(one.url, "grows", NAMES) as client:
        send_scalars(client, NAMES, 1, 20, smooth)
        page.goto(f"{one.url}/runs/grows")
        wait_for_step(page, "train/loss", 20)
        client.send(scalar_schema("eval/loss", schema_id=7))
        client.send(frame({20: [1.25]}, schema_id=7))
        expect(page.locator("figure[data-metric='eval/loss']")).to_be_visible()
        page.locator("figure[data-metric='eval/loss']").scroll_into_view_if_needed()
        wait_for_step(page, "eval/loss", 20)
        client.send(frame({40: [1.0]}, schema_id=7))
        wait_for_step(page, "eval/loss", 40)


def test_a_nan_is_marked_and_its_alert_is_drawn_and_listed(server: Callable[..., Server], page: Page) -> None:
    one = server()
    with begin_run(one.url, "broken", NAMES) as client:
        send_scalars(client, NAMES, 1, 60, smooth)
        page.goto(f"{one.url}/runs/broken")
        wait_for_step(page, "train/loss", 60)
        client.send(frame({61: [math.nan, 0.5, 0.5]}))
        client.send(frame({step: [smooth("train/loss", step), 0.5, 0.5] for step in range(62, 70)}))
        alert = page.locator("li[data-rule='non_finite']").first
        expect(alert).to_be_visible()
        marks = eventually(lambda: trace(page, "train/loss", "non-finite"), 10, what="the NaN is marked")
        assert marks["x"] == [61]
        assert marks["customdata"] == ["1 NaN"]
        shown = eventually(
            lambda: [s for s in layout(page, "train/loss")["shapes"] if s["type"] == "line"], 10
        )
    assert 61 in [shape["x0"] for shape in shown]
    expect(alert.locator(".explanation")).not_to_be_empty()
    alert.get_by_role("button", name=re.compile("Zoom charts")).click()
    low, high = layout(page, "train/loss")["range"]
    eventually(lambda: "from=" in page.url, 5)
    assert low <= 61 <= high


def test_what_was_sent_while_the_server_was_down_is_there_after_it_returns(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    client = begin_run(one.url, "resumes", NAMES)
    send_scalars(client, NAMES, 1, 30, smooth)
    page.goto(f"{one.url}/runs/resumes")
    wait_for_step(page, "train/loss", 30)
    client.close()
    one.kill()
    expect(page.locator("[data-connection='lost']")).to_be_visible()
    one.start()
    with begin_run(one.url, "resumes", NAMES) as again:
        send_scalars(again, NAMES, 31, 60, smooth)
        expect(page.locator("[data-connection='live']")).to_be_visible()
        wait_for_step(page, "train/loss", 60)
        send_scalars(again, NAMES, 61, 80, smooth)
        wait_for_step(page, "train/loss", 80)
    drawn = trace(page, "train/loss", "mean")
    assert drawn is not None
    assert drawn["x"] == list(range(1, 81))


def test_heat_map_and_flow_follow_the_run_and_show_the_bad_layer(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    layers = [("embed.weight", 10), ("blocks.0.fc.weight", 10), ("head.weight", 10)]
    with begin_run(one.url, "layers", NAMES, layers) as client:
        send_scalars(client, NAMES, 1, 30, smooth)
        client.send(layer_frame({step: [(0.1, 0), (0.2, 0), (0.3, 0)] for step in range(1, 31)}))
        page.goto(f"{one.url}/runs/layers")
        heat, flow = page.locator("figure.heat"), page.locator("figure.flow")
        expect(heat).to_have_attribute("data-last-step", "30")
        expect(flow).to_have_attribute("data-last-step", "30")
        client.send(layer_frame({step: [(0.1, 0), (0.2, 4), (0.3, 0)] for step in range(31, 34)}))
        expect(heat).to_have_attribute("data-last-step", "33")
        expect(flow.locator(".badge.bad")).to_contain_text("1 non-finite")
    drawn = page.evaluate(
        "() => document.querySelector('figure.heat .js-plotly-plot').data.map((t) => [t.name, t.z.length, t.z[1].slice(-1)[0]])"
    )
    assert drawn[0][:2] == ["magnitude", 3]
    assert drawn[1] == ["non-finite", 3, 1]
    slider = page.get_by_role("slider")
    slider.fill("10")
    expect(flow).to_have_attribute("data-last-step", "10")
    expect(flow.locator(".badge.bad")).to_have_count(0)


def settled_box(page: Page, selector: str) -> FloatRect:
    """Where an element is once it no longer moves: cards above it may still be taking their place."""
    before: list[FloatRect | None] = [None]

    def unmoved() -> FloatRect | None:
        box = page.locator(selector).bounding_box()
        same, before[0] = box == before[0], box
        return box if same else None

    return eventually(unmoved, 10, what=f"{selector} has settled", interval_s=0.2)


def test_drag_zooms_every_chart_and_double_click_returns_to_live(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    whole_run(one.url, "zoom", NAMES, 5000, smooth)
    page.goto(f"{one.url}/runs/zoom")
    wait_for_step(page, "train/loss", 4990)
    wait_for_step(page, "grad/norm", 4990)
    box = settled_box(page, "figure[data-metric='train/loss'] .plot-box")
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 80, steps=4)
    page.mouse.up()
    low, high = eventually(lambda: (r := layout(page, "grad/norm")["range"]) and r[1] < 4000 and r, 10)
    assert 1000 < low < high < 3500
    # Refetched at its own resolution: single steps, no band any more.
    eventually(
        lambda: trace(page, "train/loss", "band") is None and drawn_step(page, "train/loss") <= high, 10
    )
    assert "from=" in page.url
    page.mouse.dblclick(box["x"] + box["width"] * 0.45, box["y"] + 80)
    eventually(lambda: layout(page, "grad/norm")["range"][1] >= 5000, 10)
    assert "from=" not in page.url


def test_a_page_opened_before_the_run_shows_it_once_it_reports(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    page.goto(f"{one.url}/runs/early")
    expect(page.locator("[role=alert]")).to_be_visible()
    client = begin_run(one.url, "early", NAMES)
    send_scalars(client, NAMES, 1, 20, smooth)
    wait_for_step(page, "train/loss", 20)
    client.close()


def test_a_run_that_reports_without_a_pause_gets_its_charts(
    server: Callable[..., Server], page: Page
) -> None:
    one = server()
    client = WireClient(one.url, "young")
    client.hello()
    client.send(scalar_schema("other", schema_id=3))
    page.goto(f"{one.url}/runs/young")
    expect(page.locator("h1")).to_have_text("young")
    client.send(scalar_schema(*NAMES))
    steps = itertools.count(1)

    def report_and_look() -> int:
        step = next(steps)
        send_scalars(client, NAMES, step, step, smooth)
        return drawn_step(page, "train/loss")

    eventually(report_and_look, 15, interval_s=0.03, what="a chart is drawn while steps keep coming")
    client.close()
