"""Step time of a real training while its server is up, killed, and coming back: the training must not notice.

    python benchmarks/server_away.py [--rounds 8] [--seconds 3]

One training process runs without a pause; the server is killed (`SIGKILL`) and started again `--rounds` times, each
phase lasting `--seconds`. Every step is booked on the phase in which it ran. Both kinds of phase alternate within
one process, so what is compared differs in nothing else. Prints the median and the 99th percentile of both and their
ratio, and writes `benchmarks/results/server_away_<date>.json`. A live server works on the same machine, a dead one
does not: on few cores a ratio below 1 is that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import record
from processes import Server

TRAINER = """
import json, os, sys, time
import torch
import gradiometer as gm
torch.manual_seed(0); torch.set_num_threads(1)
layers = [part for _ in range(12) for part in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
with gm.init(project="benchmarks", name="server away") as run, open(sys.argv[1], "a", buffering=1) as log:
    run.watch(model, optimizer)
    while True:
        started = time.perf_counter()
        x = torch.randn(256, 256)
        loss = model(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.log({"train/loss": loss})
        log.write(json.dumps([time.time(), time.perf_counter() - started]) + "\\n")

        if os.path.exists(sys.argv[2]):
            break
"""


def measure(rounds: int, seconds: float, folder: Path) -> dict[str, list[float]]:
    """Durations of steps in seconds, by phase."""
    server, steps, stop = Server(folder), folder / "steps.jsonl", folder / "stop"
    environment = {
        **os.environ,
        "GRADIOMETER_URL": server.url,
        "GRADIOMETER_SPOOL": str(folder / "spool"),
        "GRADIOMETER_LINGER_S": "30",
    }
    phases: list[tuple[str, float, float]] = []
    server.start()
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(steps), str(stop)], env=environment)
    pause = threading.Event()
    try:
        pause.wait(6.0)
        for _ in range(rounds):
            for phase in ("up", "down"):
                if phase == "down":
                    server.kill()
                elif phases:
                    server.start()
                    pause.wait(1.0)
                begun_s = time.time()
                pause.wait(seconds)
                phases.append((phase, begun_s, time.time()))
        server.start()
        stop.touch()
        if trainer.wait(60) != 0:
            raise RuntimeError("the training failed")
    finally:
        trainer.terminate()
        trainer.wait(30)
        server.stop()
    booked: dict[str, list[float]] = {"up": [], "down": []}
    for line in steps.read_text().splitlines():
        at_s, took_s = json.loads(line)
        for phase, begun_s, ended_s in phases:
            if begun_s <= at_s - took_s and at_s <= ended_s:
                booked[phase].append(took_s)
    return booked


def summary(booked: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds and ratios."""
    figures: dict[str, Any] = {phase: record.spread(durations) for phase, durations in booked.items()}
    figures["down_over_up_p50"] = round(figures["down"]["p50_ms"] / figures["up"]["p50_ms"], 3)
    figures["down_over_up_p99"] = round(figures["down"]["p99_ms"] / figures["up"]["p99_ms"], 3)
    return figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gradiometer-away-") as folder:
        figures = summary(measure(options.rounds, options.seconds, Path(folder)))
    path = record.save("server_away", figures)
    print(path.read_text())


if __name__ == "__main__":
    main()
