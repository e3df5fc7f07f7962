"""What a `log` call costs the training thread: ten floats, and ten tensors, beside other tools, in one process.

    python benchmarks/log_call.py [--calls 100000] [--tensor-calls 2000] [--pace-us 200]

Between two calls the thread does arithmetic that lets go of the GIL, as a training step does, so that a tool's own
threads run as they would beside a training; each call is timed alone, in blocks of calls whose order is shuffled.
Two clocks: *wall* is what the training waits, which on a busy machine includes other programs; *CPU* is what the
call itself does. "Ten tensors" are one-element results of the training on its device (a GPU if there is one); there
*syncs* counts reads of a value, which on a GPU stop the training until everything before is computed.

Ours and wandb write offline, TensorBoard and MLflow (SQLite) to a folder, trackio to its local folder. Peers are in
`peers.txt`; one that is not installed is reported as absent. Writes `benchmarks/results/log_call_<date>.json`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch

import gradiometer as gm

NUM_METRICS = 10
BLOCK = 1000
Log = Callable[[dict[str, Any], int], None]


class Peer:
    """One tool.

    Attributes:
        log: takes ten values and a step.
        max_calls: a slower tool makes fewer calls.
    """

    max_calls = 10**9
    log: Log

    def __init__(self, folder: Path) -> None:
        raise NotImplementedError

    def close(self) -> dict[str, Any]:
        """End it; what else is worth knowing."""
        return {}


class Gradiometer(Peer):
    def __init__(self, folder: Path) -> None:
        self.run = gm.init(project="benchmarks", mode="offline", spool=folder)
        self.log = self.run.log

    def close(self) -> dict[str, Any]:
        self.run.finish(deadline_s=60.0)
        return {"dropped": sum(self.run.dropped.values())}


class Wandb(Peer):
    def __init__(self, folder: Path) -> None:
        import wandb

        settings = wandb.Settings(x_disable_stats=True, console="off", silent=True)
        self.run = wandb.init(project="x", mode="offline", dir=str(folder), settings=settings)
        self.log = lambda values, step: self.run.log(values, step=step)

    def close(self) -> dict[str, Any]:
        self.run.finish()
        return {}


class TensorBoard(Peer):
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder))

        def log(values: dict[str, Any], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        self.writer, self.log = writer, log

    def close(self) -> dict[str, Any]:
        self.writer.close()
        return {}


class Trackio(Peer):
    max_calls = 20_000

    def __init__(self, folder: Path) -> None:
        os.environ["TRACKIO_DIR"] = str(folder)
        import trackio

        self.trackio = trackio
        trackio.init(project="x", embed=False)
        self.log = lambda values, step: trackio.log(values, step=step)

    def close(self) -> dict[str, Any]:
        self.trackio.finish()
        return {}


class Mlflow(Peer):
    max_calls = 500

    def __init__(self, folder: Path) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        import mlflow

        self.mlflow = mlflow
        mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        mlflow.start_run()
        self.log = lambda values, step: mlflow.log_metrics(values, step=step)

    def close(self) -> dict[str, Any]:
        self.mlflow.end_run()
        return {}


PEERS: dict[str, type[Peer]] = {
    "gradiometer": Gradiometer,
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


class Syncs:
    """Counts reads of a tensor's value, as `.item()`, `float()` and `.cpu()` do."""

    NAMES = ("item", "__float__", "__int__", "__bool__", "cpu", "tolist", "numpy", "__array__")

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Syncs:
        self._originals = {name: getattr(torch.Tensor, name) for name in self.NAMES}
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, self._counting(original))
        return self

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import threading

        training = threading.get_ident()

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += threading.get_ident() == training
            return original(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, original)


class Samples:
    """Durations of the calls of one tool, in nanoseconds."""

    def __init__(self) -> None:
        self.wall, self.cpu = array("q"), array("q")

    def figures(self) -> dict[str, Any]:
        """Microseconds."""
        figures: dict[str, Any] = {"calls": len(self.wall)}
        for name, durations in (("wall", sorted(self.wall)), ("cpu", sorted(self.cpu))):
            figures[f"{name}_p50_us"] = round(statistics.median(durations) / 1e3, 1)
            figures[f"{name}_p99_us"] = round(durations[int(0.99 * len(durations))] / 1e3, 1)
            figures[f"{name}_max_us"] = round(durations[-1] / 1e3, 1)
        return figures


def between(pace_s: float, matrix: torch.Tensor) -> None:
    """Arithmetic outside the GIL for at least `pace_s`."""
    until_s = time.perf_counter() + pace_s
    while time.perf_counter() < until_s:
        torch.mm(matrix, matrix)


def block_of_calls(log: Log, values: dict[str, Any], samples: Samples, num: int, pace_s: float) -> None:
    matrix = torch.randn(128, 128)
    first_step = len(samples.wall) + 1
    for step in range(first_step, first_step + num):
        between(pace_s, matrix)
        cpu_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        log(values, step)
        wall_ns, cpu_ns = time.perf_counter_ns() - wall_ns, time.thread_time_ns() - cpu_ns
        samples.wall.append(wall_ns)
        samples.cpu.append(cpu_ns)


def measure(
    peers: dict[str, Peer], values: dict[str, Any], num_calls: int, pace_s: float
) -> dict[str, dict[str, Any]]:
    """Figures by tool."""
    samples = {name: Samples() for name in peers}
    for name, peer in peers.items():
        block_of_calls(peer.log, values, Samples(), 20, pace_s)
        del name
    blocks = []
    for name, peer in peers.items():
        num = min(num_calls, peer.max_calls)
        blocks += [(name, min(BLOCK, num - start)) for start in range(0, num, BLOCK)]
    random.shuffle(blocks)
    for name, num in blocks:
        block_of_calls(peers[name].log, values, samples[name], num, pace_s)
    return {name: of.figures() for name, of in samples.items()}


def opened(folder: Path) -> tuple[dict[str, Peer], list[str]]:
    """The tools that are installed, and the names of the others."""
    peers: dict[str, Peer] = {}
    absent = []
    for name, kind in PEERS.items():
        own = folder / name
        own.mkdir()
        try:
            peers[name] = kind(own)
        except ImportError as error:
            absent.append(f"{name}: {error}")
    return peers, absent


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--tensor-calls", type=int, default=2_000)
    parser.add_argument("--pace-us", type=float, default=200.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = Path(tempfile.mkdtemp(prefix="gradiometer-log-"))
    peers, absent = opened(folder)
    floats = {f"train/metric_{index}": 0.1 * index + 0.05 for index in range(NUM_METRICS)}
    tensors = {
        f"train/result_{index}": torch.tensor(0.1 * index, device=device) for index in range(NUM_METRICS)
    }
    pace_s = 1e-6 * options.pace_us
    with_floats = measure(peers, floats, options.calls, pace_s)
    with_tensors = measure(peers, tensors, options.tensor_calls, pace_s)
    for name, peer in peers.items():
        with Syncs() as syncs:
            peer.log(tensors, options.calls + options.tensor_calls)
        with_tensors[name]["syncs_per_call"] = syncs.count
        with_floats[name] |= peer.close()
    shutil.rmtree(folder, ignore_errors=True)
    result = {
        "packages": record.versions(("torch", *PEERS)),
        "pace_us": options.pace_us,
        "absent": absent,
        "ten_floats": with_floats,
        "ten_tensors": with_tensors,
    }
    path = record.save("log_call", result, device=device)
    print(path.read_text())


if __name__ == "__main__":
    main()
