"""The training process of `peers.py`: gives one tool a workload, run by the Python of the tool's own environment.

Standard library besides the tool. Takes one JSON object as its argument, and prints JSON lines: the id of each run
as it opens, a line when the last call has returned, and the figures at the end. How many steps have been logged
stands in a mapped file, which survives `kill -9`.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers_workload

Log = Callable[[int, dict[str, float]], object]
Opened = tuple[str, Log, Callable[[], object]]


def gradiometer(spec: dict[str, Any], index: int) -> Opened:
    import gradiometer as gm

    run = gm.init(project=spec["workload"], name=f"run {index}", url=spec["url"], spool=spec["folder"])

    def close() -> None:
        run.finish(deadline_s=120.0)
        if run.dropped:
            say(dropped=run.dropped)

    return run.id, lambda step, values: run.log(values, step), close


def mlflow(spec: dict[str, Any], index: int) -> Opened:
    import mlflow
    from mlflow.entities import Metric

    mlflow.set_tracking_uri(spec["url"])
    if index == 0:
        mlflow.set_experiment(spec["workload"])
    run_id = mlflow.start_run(run_name=f"run {index}").info.run_id
    if spec["mode"] == "log_metrics":
        return run_id, lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run
    client, pending = mlflow.MlflowClient(), []

    def send(num_kept: int) -> None:
        while len(pending) > num_kept:
            client.log_batch(run_id, metrics=pending[:1000])
            del pending[:1000]

    def log(step: int, values: dict[str, float]) -> None:
        now_ms = int(1000 * time.time())
        pending.extend(Metric(name, value, now_ms, step) for name, value in values.items())
        send(999)

    def close() -> None:
        send(0)
        mlflow.end_run()

    return run_id, log, close


def trackio(spec: dict[str, Any], index: int) -> Opened:
    import trackio

    where = {"server_url": spec["url"]} if spec["mode"] == "server" else {"embed": False}
    name = f"run-{index}"
    trackio.init(project=spec["workload"], name=name, auto_log_gpu=False, auto_log_cpu=False, **where)
    return name, lambda step, values: trackio.log(values, step=step), trackio.finish


def tensorboard(spec: dict[str, Any], index: int) -> Opened:
    import tensorboard.summary

    name = f"{spec['workload']}-{index}"
    writer = tensorboard.summary.Writer(str(Path(spec["folder"]) / "logs" / name))

    def log(step: int, values: dict[str, float]) -> None:
        for metric, value in values.items():
            writer.add_scalar(metric, value, step)

    return name, log, writer.close


def aim(spec: dict[str, Any], index: int) -> Opened:
    import aim

    run = aim.Run(
        repo=spec["folder"],
        experiment=spec["workload"],
        system_tracking_interval=None,
        log_system_params=False,
        capture_terminal_logs=False,
    )
    return run.hash, lambda step, values: run.track(values, step=step), run.close


TOOLS = {
    "gradiometer": gradiometer,
    "mlflow": mlflow,
    "trackio": trackio,
    "tensorboard": tensorboard,
    "aim": aim,
}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def run_all(spec: dict[str, Any]) -> None:
    """Log everything."""
    given = peers_workload.workload(spec["workload"], spec["steps"], spec["runs"])
    rows = [list(given.rows(index)) for index in range(given.runs)]
    blocked, logged = array("q"), Counter(Path(spec["progress"]))
    open_run, period_s = TOOLS[spec["tool"]], 1 / spec["pace"] if spec["pace"] else 0.0
    open_s = close_s = began_s = 0.0
    cpu_s = sum(os.times()[:4])
    for index in range(given.runs):
        before_s = time.time()
        run_id, log, close = open_run(spec, index)
        open_s += time.time() - before_s
        began_s = began_s or time.time()
        say(run=run_id)
        log_rows(log, given.names, rows[index], blocked, logged, period_s)
        before_s = time.time()
        if index == given.runs - 1:
            say(logged=True)
        close()
        close_s += time.time() - before_s
    ordered = sorted(blocked)
    say(
        began_s=began_s,
        ended_s=time.time(),
        open_s=round(open_s, 3),
        close_s=round(close_s, 3),
        blocked_p50_us=round(ordered[len(ordered) // 2] / 1e3, 1),
        blocked_p99_us=round(ordered[int(0.99 * len(ordered))] / 1e3, 1),
        blocked_mean_us=round(sum(ordered) / len(ordered) / 1e3, 1),
        blocked_max_ms=round(ordered[-1] / 1e6, 1),
        cpu_s=round(sum(os.times()[:4]) - cpu_s, 2),
    )


class Counter:
    """Steps whose call has returned, in a mapped file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def set(self, count: int) -> None:
        struct.pack_into("<q", self._map, 0, count)


def log_rows(
    log: Log,
    names: tuple[str, ...],
    rows: list[list[float]],
    blocked: array[int],
    logged: Counter,
    period_s: float,
) -> None:
    clock, started_s = time.perf_counter_ns, time.perf_counter()
    for step, row in enumerate(rows, 1):
        values = dict(zip(names, row, strict=True))
        before_ns = clock()
        log(step, values)
        blocked.append(clock() - before_ns)
        logged.set(len(blocked))
        if period_s:
            time.sleep(max(0.0, started_s + step * period_s - time.perf_counter()))


if __name__ == "__main__":
    run_all(json.loads(sys.argv[1]))
