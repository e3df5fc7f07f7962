"""Themes, narrow screens and accessibility, judged by axe in both themes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.browser.dashboard import begin_run, layer_frame, send_scalars, wait_for_step
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import frame

pytestmark = pytest.mark.browser

NAMES = ("train/loss", "grad/norm", "memory/process_bytes", "time/step_s")


def value(name: str, step: int) -> float:
    return {"memory/process_bytes": 3.5e9, "time/step_s": 0.05}.get(name, 1.0 + math.sin(step))


@pytest.fixture
def full(server: Callable[..., Server]) -> Iterator[str]:
    """URL of a server with one run that has layers, an alert and four metrics."""
    one = server()
    with begin_run(one.url, "full", NAMES, [("embed.weight", 10), ("head.weight", 10)]) as client:
        send_scalars(client, NAMES, 1, 40, value)
        client.send(layer_frame({step: [(0.1, 0), (0.2, 0)] for step in range(1, 41)}))
        client.send(frame({41: [math.nan, 1.0, 3.5e9, 0.05]}))
        yield one.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(full: str, browser: Browser, scheme: str) -> None:
    context = browser.new_context(
        color_scheme=scheme, reduced_motion="reduce", viewport={"width": 1280, "height": 900}, bypass_csp=True
    )  # type: ignore[arg-type]
    page = context.new_page()
    for path, ready in (("/", "tr[data-run]"), ("/runs/full", "li[data-alert]")):
        page.goto(full + path)
        expect(page.locator(ready).first).to_be_visible()
        if path != "/":
            wait_for_step(page, "train/loss", 40)
        results = Axe().run(page)
        assert results.violations_count == 0, results.generate_report()
    context.close()


def test_the_theme_follows_the_system_until_one_is_chosen(full: str, page: Page) -> None:
    root = page.locator("html")
    color = "() => document.querySelector('figure[data-metric] .js-plotly-plot').data[0].line.color"
    page.emulate_media(color_scheme="dark")
    page.goto(f"{full}/runs/full")
    expect(root).to_have_attribute("data-theme", "dark")
    wait_for_step(page, "train/loss", 40)
    dark = page.evaluate(color)
    page.emulate_media(color_scheme="light")
    expect(root).to_have_attribute("data-theme", "light")
    eventually(lambda: page.evaluate(color) != dark, what="the chart is drawn in the light theme's color")
    button = page.get_by_role("button", name="Theme")
    button.click()
    button.click()
    expect(root).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(root).to_have_attribute("data-theme", "dark")
    wait_for_step(page, "train/loss", 40)
    assert page.evaluate(color) == dark


def test_a_phone_needs_no_sideways_scroll(full: str, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for path in ("/", "/runs/full"):
        page.goto(full + path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # Charts below the screen are not drawn until they come near it.
    page.locator("figure[data-metric='train/loss']").scroll_into_view_if_needed()
    wait_for_step(page, "train/loss", 40)


def test_charts_are_named_and_menus_work_by_keyboard(full: str, page: Page) -> None:
    page.goto(f"{full}/runs/full")
    wait_for_step(page, "train/loss", 40)
    chart = page.get_by_role("figure", name="train/loss")
    summary = chart.locator("summary")
    summary.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    expect(dialog.get_by_role("row").nth(1)).to_contain_text("41")
    expect(dialog.get_by_role("row").nth(1)).to_contain_text("1 NaN")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    chart.get_by_role("button", name="Log scale").press("Enter")
    expect(chart.get_by_role("button", name="Log scale")).to_have_attribute("aria-pressed", "true")
