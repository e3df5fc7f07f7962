"""Starts the training processes of modes and holds what they recorded against the reference."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradiometer import wire
from gradiometer.capture.statistics import COUNT, MAX, MIN, NUM_NONFINITE, NUM_ZEROS, SUM, SUM_SQUARES
from tests.integration.modes.mode_framework import Mode
from tests.support import modes_table
from tests.support.paths import PYTHONPATH
from tests.support.recorded import Recorded, recorded

REWRITE = "REWRITE_MODES"
"""Set by `make modes`: the page is about to be written anew."""
ROOT = Path(__file__).resolve().parents[3]
EXACT = [COUNT, NUM_ZEROS, NUM_NONFINITE]


@dataclass(frozen=True, kw_only=True)
class Played:
    """A mode after it ran.

    Attributes:
        said: what each rank said of itself.
        out: what each rank recorded.
    """

    mode: Mode
    said: list[dict[str, Any]]
    out: list[Recorded]

    @property
    def notes(self) -> dict[str, Any]:
        return self.said[0]["notes"]

    @property
    def notes_bare(self) -> dict[str, Any]:
        return self.said[0]["notes_bare"]

    @property
    def expected(self) -> dict[int, dict[str, list[float] | None]]:
        """Step -> layer -> row of the full gradient."""
        return {int(step): rows for step, rows in self.said[0]["expected"].items()}


def launch(module: str, modes: Iterable[Mode], folder: Path, *, timeout_s: float = 240.0) -> None:
    """Play modes of one module and one world size in one set of processes; errors are told by `played`."""
    modes = list(modes)
    world_size = modes[0].world_size
    command = [sys.executable, "-m", "tests.integration.modes.mode_program", module, str(folder)]
    command += [mode.name for mode in modes]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
        "GRADIOMETER_SPOOL": str(folder / "spool"),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes = []
    for rank in range(world_size):
        log = (folder / f"world{world_size}.rank{rank}.log").open("wb")
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, env=environment | place, stdout=log, stderr=log, cwd=ROOT))
        log.close()
    _wait(processes, timeout_s)


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    due_s = time.monotonic() + timeout_s
    try:
        # One that failed leaves the others in a collective.
        while any(process.poll() is None for process in processes) and time.monotonic() < due_s:
            if any(process.poll() not in (None, 0) for process in processes):
                due_s = min(due_s, time.monotonic() + 5.0)
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def played(mode: Mode, folder: Path) -> Played:
    """The result of a mode that `launch` played in `folder`."""
    for rank in range(mode.world_size):
        error = folder / f"{mode.slug}.rank{rank}.error"
        assert not error.exists(), error.read_text()
    said = []
    for rank in range(mode.world_size):
        path = folder / f"{mode.slug}.rank{rank}.json"
        log = folder / f"world{mode.world_size}.rank{rank}.log"
        assert path.exists(), f"rank {rank} did not come this far:\n{log.read_text(errors='replace')[-4000:]}"
        said.append(json.loads(path.read_text()))
    return Played(mode=mode, said=said, out=[recorded(Path(one["directory"])) for one in said])


def check(result: Played) -> modes_table.Row:
    """The checks that are the same for every mode; leaves the mode's row of the table in `build/modes`."""
    mode = result.mode
    for one in result.said:
        assert one["failures"] == {}, one["failures"]
        assert one["dropped"] == {}
        assert one["watched"] == one["bare"], "the agent changed the training"
        assert one["step"] == mode.steps
    for out in result.out:
        findings = [event.attributes["check"] for event in out.of_kind("check")]
        assert findings == list(mode.findings), "an exact check misjudges this loop"
        assert set(mode.unavailable) <= set(out.unavailable()), out.unavailable()
        reasons = {
            metric: reason for metric, reason in out.unavailable().items() if metric.startswith("grad/")
        }
        assert set(reasons) <= set(mode.unavailable), (
            f"not collected, but the mode does not say so: {reasons}"
        )
        _check_times(out)
    assert result.expected, "nothing to compare with"
    worst = max(_check_step(result, step, rows) for step, rows in result.expected.items())
    row = modes_table.Row(
        name=mode.name,
        world_size=mode.world_size,
        reads=mode.reads,
        worst_error=worst,
        remarks=mode.remarks,
    )
    modes_table.keep(row)
    cells = modes_table.rows_of(modes_table.PAGE.read_text()).get(mode.name)
    if cells is not None and REWRITE not in os.environ:
        # The last bits differ from machine to machine, so an order of magnitude is not a contradiction.
        assert worst <= max(10 * modes_table.bound_of(cells[3]), 1e-6), f"docs/modes.md says {cells[3]}"
    return row


def _check_times(out: Recorded) -> None:
    """The phases add up to the step."""
    phases = [name for name in out.points if name.startswith("time/") and name != "time/step_s"]
    assert {"time/backward_s", "time/other_s"} <= set(phases)
    for step, step_s in out.points["time/step_s"].items():
        spent_s = [out.points[name][step] for name in phases]
        assert min(spent_s) >= 0.0
        assert math.isclose(sum(spent_s), step_s, rel_tol=1e-9), f"step {step}: the times do not add up"


def _check_step(result: Played, step: int, expected: dict[str, list[float] | None]) -> float:
    names = {name for out in result.out for name, rows in out.layers.items() if step in rows}
    assert names == set(expected), f"step {step}: layer names differ from the plain model's"
    worst = total = reference = 0.0
    for name, row in expected.items():
        shards = rows_by_shard(result, name, step)
        if row is None:
            assert all(shard[COUNT] == 0 for shard in shards.values()), f"{name}, step {step}: not absent"
            continue
        merged = merge(shards.values())
        assert_layer(result.mode, merged, np.array(row), f"{name}, step {step}")
        total += float(merged[SUM_SQUARES])
        reference += row[SUM_SQUARES]
        worst = max(worst, relative_error(math.sqrt(merged[SUM_SQUARES]), math.sqrt(row[SUM_SQUARES])))
    error = relative_error(math.sqrt(total), math.sqrt(reference))
    assert error <= result.mode.tolerance, f"step {step}: the norm of the whole gradient"
    return max(worst, error)


def assert_layer(mode: Mode, merged: np.ndarray, row: np.ndarray, where: str) -> None:
    """Counts exact, norm, mean, min and max within the mode's tolerances."""
    assert merged[EXACT].tolist() == row[EXACT].tolist(), f"{where}: count, zeros, non-finite"
    if row[NUM_NONFINITE]:
        return
    norm, largest = math.sqrt(row[SUM_SQUARES]), max(abs(row[MIN]), abs(row[MAX]))
    assert relative_error(math.sqrt(merged[SUM_SQUARES]), norm) <= mode.tolerance, f"{where}: norm"
    rms = norm / math.sqrt(row[COUNT])
    assert abs(merged[SUM] - row[SUM]) / row[COUNT] <= mode.element_tolerance * rms, f"{where}: mean"
    for place in (MIN, MAX):
        assert abs(merged[place] - row[place]) <= mode.element_tolerance * largest, f"{where}: min or max"


def relative_error(measured: float, true: float) -> float:
    """0 where both are equal, infinities and NaN included."""
    if measured == true or (math.isnan(measured) and math.isnan(true)):
        return 0.0
    if not math.isfinite(measured) or not math.isfinite(true):
        # The statistics of a gradient with a NaN or Inf: one as bad as the other.
        return 0.0 if math.isfinite(measured) == math.isfinite(true) else math.inf
    return abs(measured - true) / abs(true) if true else math.inf


def rows_by_shard(result: Played, name: str, step: int) -> dict[tuple[int, ...], tuple[float, ...]]:
    """One row per shard key; ranks with equal keys hold replicas."""
    shards: dict[tuple[int, ...], tuple[float, ...]] = {}
    for out in result.out:
        row = out.layers.get(name, {}).get(step)
        if row is None:
            continue
        assert len(row) == len(wire.STATISTICS)
        key = out.declared[name].shard
        known = shards.setdefault(key, row)
        # Of a row without a gradient only the count means something.
        same = known == row or known[COUNT] == row[COUNT] == 0
        assert same or not result.mode.replicas_identical, f"{name}: replicas differ"
    declared = next(out.declared[name] for out in result.out if name in out.declared)
    assert len(shards) == declared.num_shards, f"{name}: {len(shards)} shards of {declared.num_shards}"
    return shards


def merge(rows: Iterable[tuple[float, ...]]) -> np.ndarray:
    """Add rows of different shards; rows without a gradient count for nothing."""
    present = [np.array(row) for row in rows if row[COUNT] > 0]
    assert present, "no shard has a gradient"
    with np.errstate(all="ignore"):
        total = np.sum(present, axis=0)
    total[MIN] = np.min([row[MIN] for row in present])
    total[MAX] = np.max([row[MAX] for row in present])
    return total
