"""A real Chromium for the page's tests.

Playwright keeps an event loop on the main thread, so these tests run in a pytest process of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support import leaks
from tests.support.programs import find_chromium

CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, started once."""
    program = find_chromium()
    # The browser outlives the test that happens to start it; it must not carry that test's mark.
    mark = os.environ.pop(leaks.MARK, None)
    try:
        playwright = sync_playwright().start()
        started = playwright.chromium.launch(executable_path=str(program), args=CHROMIUM_ARGUMENTS)
    finally:
        if mark is not None:
            os.environ[leaks.MARK] = mark
    yield started
    started.close()
    playwright.stop()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in a context of its own; an uncaught error in its script fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(15_000)
    one = context.new_page()
    errors: list[str] = []
    one.on("pageerror", lambda error: errors.append(str(error)))
    yield one
    context.close()
    assert not errors, "uncaught errors on the page:\n" + "\n".join(errors)
