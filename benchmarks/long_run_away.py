"""A hundred thousand watched steps with the server away, then back: memory, spool, drops, and what arrives.

    python benchmarks/long_run_away.py [--steps 100000] [--limit-mib 64] [--layers 20]

A tiny model trains as fast as it can with `watch` and one `log` per step. The server is killed before the training starts
and comes back after it; the run is finished then. Prints and writes to `benchmarks/results/long_run_away_<date>.json`:
resident memory after 5 % of the steps and its largest growth after that, the size of the spool beside its limit, the
reports dropped as the agent and as the run's page count them, and the steps stored, each once. `tests/faults/
test_server_away.py` holds a shorter version to the same promises.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record
from processes import MIB, Server, wait_until

TRAINER = """
import json, sys, time
import psutil, torch
import gradiometer as gm
steps, layers = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0); torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(layers // 2)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
me = psutil.Process()
run = gm.init(project="benchmarks", name="long run away", run_id="long")
run.watch(model, optimizer)
x = torch.ones(1, 8)
memory = []
started = time.perf_counter()
for step in range(1, steps + 1):
    optimizer.zero_grad(); loss = model(x).square().mean(); loss.backward(); optimizer.step()
    run.log({"train/loss": loss})
    if step % (steps // 100) == 0:
        memory.append(me.memory_info().rss)
took = time.perf_counter() - started
run._feeder.flush(60)
print(json.dumps({"seconds": took, "memory": memory, "dropped": run.dropped, "failures": run.failures}), flush=True)
sys.stdin.readline()
run.finish(deadline_s=120)
print(json.dumps({"dropped": run.dropped}), flush=True)
"""


def stored_counts(server: Server, metric: str, steps: int) -> list[int]:
    """How often each stored step is there."""
    counts: list[int] = []
    for first in range(1, steps + 1, 5000):
        asked = {
            "series": [{"run": "long", "metric": metric}],
            "from": first,
            "to": first + 4999,
            "buckets": 5000,
        }
        [answer] = server.post("/series/query", asked)["series"]
        counts += answer["points"]["count"]
    return counts


def measure(steps: int, layers: int, limit_bytes: int, folder: Path) -> dict[str, Any]:
    """One run."""
    server = Server(folder)
    environment = {
        **os.environ,
        "GRADIOMETER_URL": server.url,
        "GRADIOMETER_SPOOL": str(folder / "spool"),
        "GRADIOMETER_SPOOL_MAX_BYTES": str(limit_bytes),
        "GRADIOMETER_LINGER_S": "120",
        "OMP_NUM_THREADS": "1",
    }
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(steps), str(layers)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert trainer.stdout is not None
        told = json.loads(trainer.stdout.readline())
        spool_bytes = sum(path.stat().st_size for path in (folder / "spool").rglob("*.seg"))
        server.start()
        back_s = time.monotonic()
        output, _ = trainer.communicate("\n", timeout=300)
        dropped = json.loads(output)["dropped"]
        wait_until(lambda: server.get("/runs/long")["state"] == "finished", "the run is finished")
        shown = server.get("/runs/long")
        counts = stored_counts(server, "train/loss", steps)
        norms = stored_counts(server, "grad/norm", steps)
        complete_after_s = time.monotonic() - back_s
    finally:
        trainer.terminate()
        trainer.wait(30)
        server.stop()
    memory = told["memory"]
    return {
        "steps": steps,
        "layers": layers,
        "seconds": round(told["seconds"], 1),
        "memory_warm_mib": round(memory[4] / MIB, 1),
        "memory_growth_mib": round((max(memory[5:]) - memory[4]) / MIB, 1),
        "spool_mib": round(spool_bytes / MIB, 2),
        "spool_limit_mib": round(limit_bytes / MIB, 2),
        "dropped": dropped,
        "dropped_shown": shown["dropped_reports"],
        "failures": told["failures"],
        "losses_stored": len(counts),
        "norms_stored": len(norms),
        "stored_twice": sum(count != 1 for count in counts + norms),
        "not_accounted_for": 2 * steps - len(counts) - len(norms) - sum(dropped.values()),
        "complete_after_s": round(complete_after_s, 1),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--limit-mib", type=float, default=64.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gradiometer-long-") as folder:
        figures = measure(options.steps, options.layers, int(options.limit_mib * MIB), Path(folder))
    path = record.save("long_run_away", figures)
    print(path.read_text())


if __name__ == "__main__":
    main()
