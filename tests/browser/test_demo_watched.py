"""The main job, watched by a person: `gradiometer demo` trains, the charts grow, a fault is on the page at once.

Each fault is a genuine one in the training; its alert must be on the page within two seconds of the step, name the
guilty layer, and be the same episode that REST shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.browser.dashboard import trace
from tests.support.demo_process import DemoProcess
from tests.support.eventually import eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow]

BREAK_AT = 70
ON_PAGE_WITHIN_S = 2.0

# Notes when an alert row first appears, by the clock that the trainer shares.
WATCH_ALERTS = """() => {
  window.alertsSeen = {};
  const look = () => document.querySelectorAll('li[data-alert]').forEach((row) => {
    window.alertsSeen[row.dataset.alert] ??= {at_s: Date.now() / 1000, text: row.textContent};
  });
  new MutationObserver(look).observe(document.body, {childList: true, subtree: true, characterData: true});
  look();
}"""


@dataclass(frozen=True)
class Case:
    """A fault, the alert that it must raise, and how many steps after the fault.

    `layer`: how the first layer's name begins; "" for a bad batch, which has no layer of its own: there the layer
    with the largest gradient of that step must be named.
    """

    fault: str
    steps: int
    rule: str
    severity: str
    layer: str
    after: int
    also: tuple[str, ...] = ()
    """Rules that tell of what the fault leads to."""


CASES = [
    Case("nan", 90, "non_finite", "critical", "blocks.2.attention", 0),
    Case("spike", 80, "grad_norm_spike", "critical", "", 0, also=("loss_spike",)),
    Case("scaler", 100, "scaler_collapse", "critical", "blocks.2.mlp.down", 3),
    Case("dead-layer", 130, "dead_layer", "warning", "blocks.2.mlp.up", 49),
]


@pytest.mark.parametrize("case", CASES, ids=[case.fault for case in CASES])
def test_a_fault_is_on_the_page_within_two_seconds(case: Case, page: Page, tmp_path: Path) -> None:
    arguments = ["--steps", str(case.steps), "--break", case.fault, "--break-at", str(BREAK_AT)]
    with DemoProcess(tmp_path, *arguments) as demo:
        page.goto(f"{demo.url}/runs/{demo.run_id}")
        page.evaluate(WATCH_ALERTS)
        demo.wait_for_the_end_of_training()
        eventually(lambda: _finished(demo, case.steps), 30, what="the run is finished on the server")
        alerts = demo.alerts()
        assert sorted(alert["rule"] for alert in alerts) == sorted((case.rule, *case.also)), alerts
        (alert,) = [found for found in alerts if found["rule"] == case.rule]
        layer = case.layer or _largest_layer(demo)
        assert alert["severity"] == case.severity
        assert alert["layer"].startswith(layer), alert["layers"]
        assert alert["first_step"] == BREAK_AT + case.after
        seen = json.loads(page.evaluate("() => JSON.stringify(window.alertsSeen)"))
        assert set(seen) == {found["id"] for found in alerts}
        lag_s = seen[alert["id"]]["at_s"] - alert["opened_s"]
        print(f"{case.fault}: on the page {lag_s:.3f} s after the step")
        assert lag_s <= ON_PAGE_WITHIN_S
        assert alert["layer"] in seen[alert["id"]]["text"]
        # What the page says in the end is what REST says: same episode, same words.
        shown = eventually(lambda: _shown(page, alert), 5, what="the page's last word is REST's")
        assert alert["advice"] in shown
        assert demo.interrupt() == 0, demo.output


def test_points_appear_while_it_trains(page: Page, tmp_path: Path) -> None:
    # Far more steps than are waited for: Ctrl-C ends it.
    with DemoProcess(tmp_path, "--steps", "5000") as demo:
        page.goto(f"{demo.url}/runs/{demo.run_id}")
        first = eventually(lambda: _drawn(page, 5), 60, what="points of the loss are drawn")
        second = eventually(lambda: _drawn(page, len(first) + 20), 60, what="20 more points are drawn")
        assert demo.get(f"/runs/{demo.run_id}")["state"] == "running"
        assert "The training is over" not in demo.output
        assert second[: len(first)] == first
        assert max(step for step, _ in second) > max(step for step, _ in first)
        assert demo.interrupt() == 0, demo.output


def _drawn(page: Page, at_least: int) -> list[tuple[int, float]]:
    """Points of the loss as drawn, if there are so many."""
    drawn = trace(page, "train/loss", "mean")
    points = list(zip(drawn["x"], drawn["y"], strict=True)) if drawn else []
    return points if len(points) >= at_least else []


def _shown(page: Page, alert: dict[str, Any]) -> str | None:
    text = page.locator(f'li[data-alert="{alert["id"]}"]').inner_text()
    return text if alert["title"] in text and alert["explanation"] in text else None


def _largest_layer(demo: DemoProcess) -> str:
    """The layer with the largest gradient norm at the step of the fault."""
    flow = demo.get(f"/runs/{demo.run_id}/layers/flow", step=BREAK_AT)
    assert flow["step"] == BREAK_AT
    norms = [norm if isinstance(norm, float | int) else -1.0 for norm in flow["statistics"]["norm"]]
    return str(flow["layers"][norms.index(max(norms))])


def _finished(demo: DemoProcess, steps: int) -> bool:
    run = demo.get(f"/runs/{demo.run_id}")
    return bool(run["state"] == "finished" and run["last_step"] == steps)
