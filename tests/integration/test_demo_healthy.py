"""`gradiometer demo` without a fault is a healthy training: it learns, ends well and raises no alert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.demo_process import DemoProcess
from tests.support.eventually import eventually

STEPS = 150


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_without_a_fault_raises_no_alert(seed: int, tmp_path: Path) -> None:
    with DemoProcess(tmp_path, "--steps", str(STEPS), "--seed", str(seed)) as demo:
        demo.wait_for_the_end_of_training()
        run = eventually(lambda: _finished(demo), 30, what="the run is finished on the server")
        assert demo.alerts() == []
        assert run["latest"]["train/loss"] < 3.0
        assert run["exit"]["code"] == 0
        assert demo.interrupt() == 0, demo.output


def _finished(demo: DemoProcess) -> dict[str, Any] | None:
    run: dict[str, Any] = demo.get(f"/runs/{demo.run_id}")
    return run if run["state"] == "finished" and run["last_step"] == STEPS else None
