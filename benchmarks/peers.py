"""The same workloads through other tools and ours, one after another: speed, disk, reads, and what a killed trainer loses.

    python benchmarks/peers.py [--quick] [--tools mlflow trackio ...] [--environments FOLDER]

Every tool gets a virtual environment of its own below `--environments` (made if it is missing, with the versions of
`peers.txt`; one that cannot be installed is reported as absent), a server of its own and an empty folder. Ours runs
from this environment with a real `gradiometer serve`. Per workload of `peers_workload.py`:
 - *blocked*: how long the training waits in the call of one step;
 - *values/s*: from the first call until a read through the tool's public interface returns the last value of the last run,
   with the run closed after its last step as a training does; CPU time of the training process, its
   helpers (our uplink) and the server;
 - *bytes per value*: files of the data, after the server is stopped where that is quick, less what they took empty; and
   once more after free pages were given back (`gradiometer db vacuum --full`, SQLite's VACUUM);
 - *reads*: one series as the tool's own page asks for it, and the last values of all series; median of five.
Then the training process alone is killed (`SIGKILL`), at a steady pace and as fast as it goes: *lost* are values whose call
had returned, less those that can be read afterwards.

*cores of others* is how much of the machine other programs took meanwhile: where it differs much between two rows, compare
their CPU times. A slow tool gets fewer steps, which are in the result: rates and bytes per value do not depend on that much, its reads
are faster for it. Writes `benchmarks/results/peers_<date>.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
from peers_report import compared, table
from peers_tools import TOOLS, Tool
from peers_workload import Workload, workload
from processes import busy_s, wait_until

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradiometer-benchmarks" / "peers"

CASES: dict[tuple[str, str], dict[str, tuple[int, int]]] = {
    ("gradiometer", ""): {"scalars": (100_000, 1), "layers": (500, 1), "runs": (2_000, 20)},
    ("trackio", "server"): {"scalars": (100_000, 1), "layers": (500, 1), "runs": (2_000, 20)},
    ("trackio", "local"): {"scalars": (100_000, 1), "layers": (500, 1), "runs": (2_000, 20)},
    ("tensorboard", ""): {"scalars": (10_000, 1), "layers": (50, 1), "runs": (500, 5)},
    ("aim", ""): {"scalars": (2_000, 1), "layers": (10, 1), "runs": (200, 5)},
    ("mlflow", "log_batch"): {"scalars": (5_000, 1), "layers": (20, 1), "runs": (500, 5)},
    ("mlflow", "log_metrics"): {"scalars": (100, 1), "layers": (8, 1)},
}
"""Tool and way to use it -> workload -> steps and runs."""
FAST = {case: CASES[case] for case in (("gradiometer", ""), ("trackio", "server"), ("trackio", "local"))}
KILLS: dict[tuple[str, str], tuple[float, ...]] = {
    ("gradiometer", ""): (200, 0),
    ("trackio", "server"): (200, 0),
    ("trackio", "local"): (200, 0),
    ("tensorboard", "every sample"): (200, 0),
    ("aim", ""): (100, 0),
    ("mlflow", "log_metrics"): (20,),
}
"""Tool -> steps per second; 0: as fast as it goes."""
QUICK_SHARE = 0.1
QUICK_LEAVES_OUT = ("runs", "log_metrics")
KILL_AFTER_S = 3.0
"""Or after half of the steps, if that is sooner."""
READS = 5
LONG_READ_S = 3.0
"""Reads that take long are not repeated."""
TIMEOUT_S = 300.0


class Producer:
    """The training process of one tool, and what it has said so far."""

    def __init__(self, tool: Tool, given: Workload, *, pace: float = 0) -> None:
        self.progress = tool.folder / "progress"
        url = tool.url
        if tool.name == "trackio":
            url = f"{url}/?write_token={tool.token}"  # type: ignore[attr-defined]
        spec = {
            "tool": tool.name,
            "mode": tool.mode,
            "workload": given.name,
            "steps": given.steps,
            "runs": given.runs,
            "pace": pace,
            "url": url,
            "folder": str(tool.folder),
            "progress": str(self.progress),
        }
        self.said: list[dict[str, Any]] = []
        environment = tool.environment
        if tool.name == "trackio" and tool.mode == "server":
            environment["TRACKIO_DIR"] = str(tool.folder / "client")
        with (tool.folder / "producer.log").open("ab") as log:
            self._process = subprocess.Popen(
                [tool.python, str(HERE / "peers_producer.py"), json.dumps(spec)],
                env=environment,
                cwd=tool.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._log = tool.folder / "producer.log"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # Some tools print a line of their own.
            if line.startswith("{"):
                self.said.append(json.loads(line))

    def has_said(self, key: str) -> bool:
        """Whether it has come so far; raises `RuntimeError` if it failed before that."""
        if any(key in each for each in self.said):
            return True
        if self._process.poll() not in (None, 0):
            raise RuntimeError(f"the training process failed: {self._log.read_text()[-2000:]}")
        return False

    @property
    def runs(self) -> list[str]:
        return [each["run"] for each in self.said if "run" in each]

    def figures(self) -> dict[str, Any]:
        """What it says at its end."""
        wait_until(lambda: self.has_said("ended_s"), "the training process ends", timeout_s=TIMEOUT_S)
        self._process.wait()
        self._reader.join()
        dropped = [each for each in self.said if "dropped" in each]
        return {**self.said[-1], **(dropped[-1] if dropped else {})}

    def steps_done(self) -> int:
        data = self.progress.read_bytes() if self.progress.exists() else b""
        return int(struct.unpack("<q", data)[0]) if len(data) == 8 else 0

    def kill(self) -> int:
        """SIGKILL to this process alone; returns the steps whose call had returned."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        return self.steps_done()


def write(tool: Tool, given: Workload) -> dict[str, Any]:
    """Run one workload until its last value can be read."""
    expected = given.last_row(given.runs - 1)[-1]
    empty_bytes, server_s = tool.stored_bytes(), tool.server_cpu_s()
    started_s, own_s, all_s = time.time(), time.process_time(), busy_s()
    producer = Producer(tool, given)
    if hasattr(tool, "project"):
        tool.project = given.name

    def logged() -> bool:
        tool.helpers_cpu_s()
        return producer.has_said("logged")

    wait_until(logged, "everything is logged", timeout_s=TIMEOUT_S)

    def visible() -> bool:
        tool.helpers_cpu_s()
        value = tool.last(producer.runs[-1], given.names[-1], given.steps)
        # TensorBoard keeps single precision.
        return value is not None and abs(value - expected) <= 1e-6 * abs(expected)

    wait_until(visible, "the last value can be read", timeout_s=TIMEOUT_S, every_s=0.02)
    visible_s, server_s = time.time(), tool.server_cpu_s() - server_s
    own_s, all_s = time.process_time() - own_s, busy_s() - all_s
    figures = producer.figures()
    took_s, helpers_s = visible_s - figures["began_s"], tool.helpers_cpu_s()
    others_s = all_s - own_s - server_s - helpers_s - figures["cpu_s"]
    result = {
        "runs": given.runs,
        "metrics": len(given.names),
        "steps": given.steps,
        "values": given.num_values,
        "values_per_s": round(given.num_values / took_s),
        "visible_after_s": round(took_s, 2),
        **{key: value for key, value in figures.items() if key not in ("began_s", "ended_s")},
        "helpers_cpu_s": round(helpers_s, 2),
        "server_cpu_s": round(server_s, 2),
        "cpu_us_per_value": round(1e6 * (figures["cpu_s"] + helpers_s + server_s) / given.num_values, 2),
        "cores_of_others": round(max(0.0, others_s) / (visible_s - started_s), 2),
        "reads": reads(tool, given, producer.runs[-1]),
    }
    return result | {"empty_bytes": empty_bytes}


def reads(tool: Tool, given: Workload, run: str) -> dict[str, Any]:
    """Milliseconds, and how much came."""

    def is_found() -> bool:
        with contextlib.suppress(urllib.error.HTTPError):
            return tool.chart(run, given.names[0]) > 0
        return False

    # Aim does not find a run for a moment when it has just been closed.
    wait_until(is_found, "the closed run is found")
    figures: dict[str, Any] = {}
    for name, read in (
        ("chart", lambda: tool.chart(run, given.names[0])),
        ("latest", lambda: tool.latest(run, given.names)),
    ):
        durations: list[float] = []
        while len(durations) < READS and sum(durations) < LONG_READ_S:
            started_s = time.perf_counter()
            num = read()
            durations.append(time.perf_counter() - started_s)
        figures[f"{name}_ms"] = round(1e3 * statistics.median(durations), 1)
        figures[f"{name}_points"] = num
    return figures


def kill(tool: Tool, pace: float) -> dict[str, Any]:
    """Kill the training process in the middle, and count."""
    given = workload("scalars", 100_000)
    if hasattr(tool, "project"):
        tool.project = given.name
    producer = Producer(tool, given, pace=pace)
    wait_until(lambda: producer.steps_done() > 0, "the first step is logged")
    killed_by_s = time.monotonic() + KILL_AFTER_S
    while time.monotonic() < killed_by_s and producer.steps_done() < given.steps / 2:
        threading.Event().wait(0.005)
    logged = producer.kill() * len(given.names)
    readable, killed_s, quiet_since_s = -1, time.monotonic(), time.monotonic()
    while time.monotonic() - quiet_since_s < tool.readable_after_s and readable < logged:
        threading.Event().wait(0.2)
        before, readable = readable, tool.readable(producer.runs[0], given.names)
        if readable != before:
            quiet_since_s = time.monotonic()
    return {
        "steps_per_s": pace or "as fast as it goes",
        "logged": logged,
        "readable": readable,
        # A call that was under way may have done its work.
        "lost": max(0, logged - readable),
        "all_readable_after_s": round(quiet_since_s - killed_s, 1),
    }


def environment_of(kind: type[Tool], environments: Path) -> str | None:
    """Make the tool's virtual environment if it is missing; returns why it cannot be used, or None."""
    folder = environments / kind.name
    if not kind.requirements or (folder / "complete").exists():
        return None
    pins = dict(line.split("==") for line in (HERE / "peers.txt").read_text().splitlines() if "==" in line)
    wanted = [f"{each}=={pins[each]}" if each in pins else each for each in kind.requirements]
    print(f"installing {' '.join(wanted)} into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        return installed.stderr.strip().splitlines()[-1]
    (folder / "complete").write_text("\n".join(wanted) + "\n")
    return None


def version_of(kind: type[Tool], environments: Path) -> str:
    package = kind.requirements[0].partition("==")[0] if kind.requirements else kind.name
    python = str(environments / kind.name / "bin" / "python") if kind.requirements else sys.executable
    asked = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


class Benchmark:
    """All of it, in a folder of its own.

    Attributes:
        rows: one per tool, way to use it and workload.
        kills: one per tool, way and pace.
    """

    def __init__(self, folder: Path, environments: Path, quick: bool) -> None:
        self._folder, self._environments, self._quick = folder, environments, quick
        self._num_folders = 0
        self.rows: list[dict[str, Any]] = []
        self.kills: list[dict[str, Any]] = []

    def _tool(self, name: str, mode: str) -> Tool:
        self._num_folders += 1
        return TOOLS[name](mode, self._folder / f"{self._num_folders}-{name}", self._environments)

    def write_all(self, name: str, mode: str, only: str = "") -> None:
        """Each workload, or one; MLflow takes so long to start that its server is kept."""
        tools = self._servers(name, mode)
        for key, (steps, runs) in CASES[name, mode].items():
            if (only and key != only) or (self._quick and {key, mode} & set(QUICK_LEAVES_OUT)):
                continue
            given = workload(key, max(5, int(steps * (QUICK_SHARE if self._quick else 1))), runs)
            self._write_one(next(tools), given)
        tools.close()

    def _servers(self, name: str, mode: str) -> Iterator[Tool]:
        shared = name == "mlflow"
        tool = self._tool(name, mode)
        while True:
            tool.start()
            try:
                yield tool
                while shared:
                    yield tool
            finally:
                tool.stop()
            tool = self._tool(name, mode)

    def _write_one(self, tool: Tool, given: Workload) -> None:
        row: dict[str, Any] = {"tool": tool.name, "mode": tool.mode, "workload": given.name}
        try:
            figures = write(tool, given)
        except (RuntimeError, TimeoutError, OSError) as error:
            self.rows.append(row | {"error": f"{type(error).__name__}: {error}"[-500:]})
            print(self.rows[-1], flush=True)
            return
        if tool.name != "mlflow":
            # Only then is SQLite's write-ahead log in the database itself.
            tool.stop()
        empty_bytes = figures.pop("empty_bytes")
        figures["bytes_per_value"] = round((tool.stored_bytes() - empty_bytes) / given.num_values, 2)
        if tool.vacuum():
            vacuumed = round((tool.stored_bytes() - empty_bytes) / given.num_values, 2)
            figures["bytes_per_value_vacuumed"] = vacuumed
        self.rows.append(row | figures)
        print(json.dumps(self.rows[-1]), flush=True)

    def kill_all(self, name: str, mode: str) -> None:
        """At each pace."""
        for pace in KILLS[name, mode][-1:] if self._quick else KILLS[name, mode]:
            tool = self._tool(name, mode)
            tool.start()
            try:
                figures = kill(tool, pace)
            except (RuntimeError, TimeoutError, OSError) as error:
                figures = {"steps_per_s": pace, "error": f"{type(error).__name__}: {error}"[-500:]}
            finally:
                tool.stop()
            self.kills.append({"tool": name, "mode": mode, **figures})
            print(json.dumps(self.kills[-1]), flush=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--environments", type=Path, default=CACHE, help=f"folder ({CACHE})")
    options = parser.parse_args()
    environments = options.environments.absolute()
    absent = {}
    for name in options.tools:
        if why := environment_of(TOOLS[name], environments):
            absent[name] = why
    wanted = [name for name in options.tools if name not in absent]
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradiometer-peers-") as folder:
        benchmark = Benchmark(Path(folder), environments, options.quick)
        # The fast ones take turns, workload by workload: whatever else the machine does changes slowly.
        for given in ("scalars", "layers", "runs"):
            for name, mode in FAST:
                if name in wanted:
                    benchmark.write_all(name, mode, given)
        for name, mode in [case for case in CASES if case not in FAST]:
            if name in wanted:
                benchmark.write_all(name, mode)
        for name, mode in KILLS:
            if name in wanted:
                benchmark.kill_all(name, mode)
    result = {
        "packages": {name: version_of(TOOLS[name], environments) for name in wanted},
        "absent": absent,
        "quick": options.quick,
        "took_s": round(time.monotonic() - started_s),
        "compared": compared(benchmark.rows),
        "writes": benchmark.rows,
        "kills": benchmark.kills,
    }
    print("\n".join(table(result)))
    print(record.save("peers", result, name="peers_quick" if options.quick else "peers"))


if __name__ == "__main__":
    main()
