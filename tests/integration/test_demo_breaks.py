"""`gradiometer demo --break X`: a genuine fault becomes one alert that names the guilty layer; without, none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.demo_process import DemoProcess
from tests.support.eventually import eventually

pytestmark = pytest.mark.slow

BREAK_AT = 70


@dataclass(frozen=True)
class Case:
    fault: str
    steps: int
    rule: str
    severity: str
    layer: str
    within: int
    """Steps from the fault to the alert."""
    # A bad batch has no layer of its own; `largest_layer` says where it hit.


CASES = [
    Case("nan", 90, "non_finite", "critical", "blocks.2.attention", 0),
    Case("spike", 80, "grad_norm_spike", "critical", "", 0),
    Case("scaler", 100, "scaler_collapse", "critical", "blocks.2.mlp.down", 3),
    Case("dead-layer", 130, "dead_layer", "warning", "blocks.2.mlp.up", 49),
]


def run_until_trained(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Alerts and run as REST shows them when the training is over and Ctrl-C has still to come."""
    with DemoProcess(folder, *arguments) as demo:
        demo.wait_for_the_end_of_training()
        steps = int(arguments[arguments.index("--steps") + 1])
        run = eventually(
            lambda: _finished(demo, steps), 30, what="the run is finished on the server", interval_s=0.2
        )
        alerts = demo.alerts()
        run["largest_layer"] = largest_layer(demo, BREAK_AT)
        assert demo.interrupt() == 0, demo.output
        assert "Traceback" not in demo.output
    return alerts, run


def largest_layer(demo: DemoProcess, step: int) -> str:
    """The layer with the largest gradient norm at `step`, from the stored layer statistics."""
    flow = demo.get(f"/runs/{demo.run_id}/layers/flow", step=step)
    assert flow["step"] == step
    norms = [norm if isinstance(norm, float | int) else -1.0 for norm in flow["statistics"]["norm"]]
    return str(flow["layers"][norms.index(max(norms))])


def _finished(demo: DemoProcess, steps: int) -> dict[str, Any] | None:
    run: dict[str, Any] = demo.get(f"/runs/{demo.run_id}")
    return run if run["state"] == "finished" and run["last_step"] == steps else None


@pytest.mark.parametrize("case", CASES, ids=[case.fault for case in CASES])
def test_a_fault_raises_its_alert_and_names_the_layer(case: Case, tmp_path: Path) -> None:
    arguments = ["--steps", str(case.steps), "--break", case.fault, "--break-at", str(BREAK_AT)]
    alerts, run = run_until_trained(tmp_path, *arguments)
    assert [alert["rule"] for alert in alerts] == [case.rule], alerts
    alert = alerts[0]
    assert alert["severity"] == case.severity
    assert alert["layer"].startswith(case.layer or run["largest_layer"]), alert["layers"]
    assert alert["first_step"] == BREAK_AT + case.within
    assert alert["layer"] in alert["title"]
    assert alert["explanation"]
    assert alert["advice"]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_without_a_fault_raises_no_alert(seed: int, tmp_path: Path) -> None:
    alerts, run = run_until_trained(tmp_path, "--steps", "150", "--seed", str(seed))
    assert alerts == []
    assert run["latest"]["train/loss"] < 3.0
    assert run["exit"]["code"] == 0
