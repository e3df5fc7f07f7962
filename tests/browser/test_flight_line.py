"""Where the flight recorder saved a step is said on the run's page."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from gradiometer import wire
from tests.browser.dashboard import begin_run, send_scalars
from tests.support.server import Server

pytestmark = pytest.mark.browser


def test_the_page_says_where_a_step_was_saved(server: Callable[..., Server], page: Page) -> None:
    one = server()
    attributes = {
        "path": "/shared/dumps/r/step-00000040", "reason": "a gradient is not finite", "host": "node-3",
        "bytes": 12_345, "rank": 1,
    }  # fmt: skip
    with begin_run(one.url, "flight", ("train/loss",)) as client:
        send_scalars(client, ("train/loss",), 1, 50, lambda _name, step: 1.0 / step)
        client.send(wire.encode(wire.Event(kind="dump", time=1.8e9, step=40, attributes=attributes)))
        page.goto(f"{one.url}/runs/flight")
        line = page.locator(".dump")
        expect(line).to_have_text(
            "Flight recorder: saved step 40 at /shared/dumps/r/step-00000040 (node-3): a gradient is not finite."
        )
