"""A real training process for fault tests: `python -m tests.faults.steady_trainer STEPS PERIOD_S LOG`.

Trains a small network for STEPS optimizer steps, at least PERIOD_S seconds each, and appends one JSON line per step
to LOG: step, loss, wall time and the duration of everything but the waiting. The agent's settings come from the
environment.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch

import gradiometer as gm


def main(steps: int, period_s: float, log_path: Path) -> None:
    """Train, and say what was seen."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pace = threading.Event()
    with gm.init(project="faults", name="steady") as run, log_path.open("a", buffering=1) as log:
        run.watch(model, optimizer)
        for _ in range(steps):
            started_s = time.perf_counter()
            x = torch.randn(64, 32)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"train/loss": loss})
            took_s = time.perf_counter() - started_s
            line = {"step": run.step, "loss": loss.item(), "wall_s": time.time(), "took_s": took_s}
            log.write(json.dumps(line) + "\n")
            pace.wait(max(0.0, period_s - took_s))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
