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
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

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


def start_server(port: int, folder: Path) -> subprocess.Popen[bytes]:
    """A server on `port`; returns once it answers."""
    command = [sys.executable, "-m", "gradiometer_server", "serve", "--port", str(port)]
    environment = {**os.environ, "GRADIOMETER_DATABASE_URL": f"sqlite:///{folder / 'away.db'}"}
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
            return process
        except OSError:
            threading.Event().wait(0.05)
    raise RuntimeError((folder / "server.log").read_text())


def free_port() -> int:
    """A port of the loopback interface that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(rounds: int, seconds: float, folder: Path) -> dict[str, list[float]]:
    """Durations of steps in seconds, by phase."""
    port, steps, stop = free_port(), folder / "steps.jsonl", folder / "stop"
    environment = {
        **os.environ,
        "GRADIOMETER_URL": f"http://127.0.0.1:{port}",
        "GRADIOMETER_SPOOL": str(folder / "spool"),
        "GRADIOMETER_LINGER_S": "30",
    }
    phases: list[tuple[str, float, float]] = []
    server = start_server(port, folder)
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(steps), str(stop)], env=environment)
    pause = threading.Event()
    try:
        pause.wait(6.0)
        for _ in range(rounds):
            for phase in ("up", "down"):
                if phase == "down":
                    server.kill()
                    server.wait()
                elif phases:
                    server = start_server(port, folder)
                    pause.wait(1.0)
                begun_s = time.time()
                pause.wait(seconds)
                phases.append((phase, begun_s, time.time()))
        server = start_server(port, folder)
        stop.touch()
        if trainer.wait(60) != 0:
            raise RuntimeError("the training failed")
    finally:
        for process in (trainer, server):
            process.terminate()
            process.wait(30)
    booked: dict[str, list[float]] = {"up": [], "down": []}
    for line in steps.read_text().splitlines():
        at_s, took_s = json.loads(line)
        for phase, begun_s, ended_s in phases:
            if begun_s <= at_s - took_s and at_s <= ended_s:
                booked[phase].append(took_s)
    return booked


def summary(booked: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds and ratios."""
    figures: dict[str, Any] = {}
    for phase, durations in booked.items():
        ordered = sorted(durations)
        figures[phase] = {
            "steps": len(ordered),
            "p50_ms": round(1e3 * statistics.median(ordered), 3),
            "p99_ms": round(1e3 * ordered[int(0.99 * len(ordered))], 3),
            "max_ms": round(1e3 * ordered[-1], 3),
        }
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
    now = datetime.datetime.now(datetime.UTC)
    machine = {
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "python": platform.python_version(),
    }
    result = {
        "benchmark": "server_away",
        "date": now.isoformat(timespec="seconds"),
        "machine": machine,
        **figures,
    }
    print(json.dumps(result, indent=1))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"server_away_{now.date()}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
