"""Photographs the page for the documentation, in both colour schemes."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.browser.conftest import CHROMIUM_ARGUMENTS
from tests.support.programs import find_chromium

SIZE = {"width": 1280, "height": 860}


def take_all(base_url: str, out_dir: Path) -> None:
    """Write `runs-*.png` and `run-*.png` of the server at `base_url`; the newest run is the one shown."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(find_chromium()), args=CHROMIUM_ARGUMENTS)
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
            page = context.new_page()
            newest = page.request.get(f"{base_url}/api/v1/runs").json()["runs"][0]["id"]
            page.goto(base_url)
            expect(page.get_by_role("row").nth(1)).to_be_visible()
            page.screenshot(path=out_dir / f"runs-{scheme}.png")
            page.goto(f"{base_url}/runs/{newest}")
            _wait_for_charts(page)
            page.screenshot(path=out_dir / f"run-{scheme}.png")
            context.close()
        browser.close()


def _wait_for_charts(page: Page) -> None:
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible(timeout=30_000)
    # Cards draw one after the other; a picture has no event that says "the last one is there".
    page.wait_for_timeout(3_000)
