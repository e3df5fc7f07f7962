"""The tools of `peers.py` as seen from outside: how their server is started, and read through its public interface."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import Server, bytes_in, call, cpu_s, descendants, free_port, wait_until

QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "AIM_UI_TELEMETRY_ENABLED": "0",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""No tool may talk to anybody else; MLflow's seven job runners have no part in metrics and would only take CPU time."""


class Tool:
    """One tool, one way to use it, one folder.

    Attributes:
        requirements: of its virtual environment; empty: this environment.
        has_server: values reach a server on their way; else it only reads what the training process wrote.
        readable_after_s: how long after a `kill -9` nothing new must have become readable before what is missing is lost.
    """

    name = ""
    requirements: tuple[str, ...] = ()
    has_server = True
    readable_after_s = 6.0

    def __init__(self, mode: str, folder: Path, environments: Path) -> None:
        self.mode, self.folder = mode, folder
        self.bin = environments / self.name / "bin" if self.requirements else Path(sys.executable).parent
        self.python = str(self.bin / "python") if self.requirements else sys.executable
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)

    @property
    def environment(self) -> dict[str, str]:
        own = {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH" or not self.requirements
        }
        return {**own, **QUIET, "PATH": f"{self.bin}:{os.environ['PATH']}"}

    def command(self) -> list[str]:
        raise NotImplementedError

    ready_path = "/"

    def start(self) -> None:
        """Start the server; returns once it answers."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers, f"the server of {self.name} answers", timeout_s=180)

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError((self.folder / "server.log").read_text()[-2000:])
        try:
            urllib.request.urlopen(self.url + self.ready_path, timeout=5).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """End the server and all its processes, which are in a session of their own."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def server_cpu_s(self) -> float:
        """CPU seconds of the server's living processes."""
        pid = self.server_pid()
        return cpu_s(pid, *descendants(pid)) if pid else 0.0

    def server_pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def helpers_cpu_s(self) -> float:
        """CPU seconds of processes that the training process has started besides, seen so far."""
        return 0.0

    def stored_bytes(self) -> int:
        """What the values take on disk."""
        raise NotImplementedError

    def vacuum(self) -> bool:
        """Give free pages of the database back, the server being stopped; False if this tool has no such thing."""
        return False

    def last(self, run: str, metric: str, step: int) -> float | None:
        """The value of `metric` at its last step `step`; None: not to be read yet. The cheapest way to ask."""
        raise NotImplementedError

    def chart(self, run: str, metric: str) -> int:
        """Read a series as the tool's own page does; returns the number of points."""
        raise NotImplementedError

    def latest(self, run: str, names: Sequence[str]) -> int:
        """Read the last value of all series; returns how many there are."""
        raise NotImplementedError

    def readable(self, run: str, names: Sequence[str]) -> int:
        """How many values can be read."""
        raise NotImplementedError


class Gradiometer(Tool):
    name = "gradiometer"
    # The uplink goes on without the trainer, and what it delivers counts as points once it is folded.
    readable_after_s = 20.0

    def start(self) -> None:
        self._server = Server(self.folder).start()
        self.url = self._server.url
        self._uplinks: dict[int, float] = {}

    def helpers_cpu_s(self) -> float:
        # They outlive the training process, and end when everything is delivered.
        for path in self.folder.glob("*/*/uplink.json"):
            with contextlib.suppress(OSError, ValueError):
                pid = json.loads(path.read_bytes())["pid"]
                self._uplinks[pid] = max(self._uplinks.get(pid, 0.0), cpu_s(pid))
        return sum(self._uplinks.values())

    def stop(self) -> None:
        self._server.stop()

    def server_pid(self) -> int:
        return self._server.pid

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("benchmark.db*"))

    def vacuum(self) -> bool:
        command = [sys.executable, "-m", "gradiometer_server", "db", "vacuum", "--full", "--quiet"]
        subprocess.run([*command, "--database", self._server.database], check=True, capture_output=True)
        return True

    def last(self, run: str, metric: str, step: int) -> float | None:
        asked = {"series": [{"run": run, "metric": metric}], "from": step, "to": step, "buckets": 1}
        with contextlib.suppress(urllib.error.HTTPError):
            points = self._server.post("/series/query", asked)["series"][0]["points"]
            return points["mean"][0] if points["step"] == [step] else None
        return None

    def chart(self, run: str, metric: str) -> int:
        asked = {"series": [{"run": run, "metric": metric}], "buckets": 2000}
        return len(self._server.post("/series/query", asked)["series"][0]["points"]["step"])

    def latest(self, run: str, names: Sequence[str]) -> int:
        return len(set(names) & self._server.get(f"/runs/{run}")["latest"].keys())

    def readable(self, run: str, names: Sequence[str]) -> int:
        asked = {"series": [{"run": run, "metric": name} for name in names], "buckets": 5000}
        with contextlib.suppress(urllib.error.HTTPError):
            found = self._server.post("/series/query", asked)["series"]
            return sum(sum(series["points"]["count"]) for series in found)
        return 0


class Mlflow(Tool):
    name = "mlflow"
    requirements = ("mlflow",)
    ready_path = "/health"

    def command(self) -> list[str]:
        store = f"sqlite:///{self.folder / 'mlflow.db'}"
        command = [str(self.bin / "mlflow"), "server", "--backend-store-uri", store]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        return [*command, "--host", "127.0.0.1", "--port", str(self.port)]

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("mlflow.db*"))

    def _get(self, path: str, **asked: Any) -> Any:
        return call(f"{self.url}{path}?{urllib.parse.urlencode(asked)}")

    def last(self, run: str, metric: str, step: int) -> float | None:
        metrics = self._get("/api/2.0/mlflow/runs/get", run_id=run)["run"]["data"].get("metrics", ())
        found = (each["value"] for each in metrics if each["key"] == metric and int(each["step"]) == step)
        return next(found, None)

    def chart(self, run: str, metric: str) -> int:
        path = "/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval"
        return len(self._get(path, run_ids=run, metric_key=metric, max_results=2500)["metrics"])

    def latest(self, run: str, names: Sequence[str]) -> int:
        return len(self._get("/api/2.0/mlflow/runs/get", run_id=run)["run"]["data"]["metrics"])

    def readable(self, run: str, names: Sequence[str]) -> int:
        return sum(self._history(run, metric) for metric in names)

    def _history(self, run: str, metric: str) -> int:
        num, more = 0, {}
        while True:
            path = "/api/2.0/mlflow/metrics/get-history"
            page = self._get(path, run_id=run, metric_key=metric, max_results=25_000, **more)
            num += len(page.get("metrics", ()))
            if not page.get("next_page_token"):
                return num
            more = {"page_token": page["next_page_token"]}


class Trackio(Tool):
    name = "trackio"
    requirements = ("trackio",)
    token = "token-of-the-benchmark"

    def __init__(self, mode: str, folder: Path, environments: Path) -> None:
        super().__init__(mode, folder, environments)
        self.has_server = mode == "server"
        self.project = ""

    @property
    def environment(self) -> dict[str, str]:
        return {
            **super().environment,
            "TRACKIO_DIR": str(self.folder / "data"),
            "TRACKIO_WRITE_TOKEN": self.token,
            "GRADIO_SERVER_PORT": str(self.port),
        }

    def command(self) -> list[str]:
        show = f"trackio.show(open_browser=False, host='127.0.0.1', server_port={self.port})"
        return [self.python, "-c", f"import trackio; {show}"]

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "data").glob("*.db*"))

    def vacuum(self) -> bool:
        for path in (self.folder / "data").glob("*.db"):
            with contextlib.closing(sqlite3.connect(path)) as database:
                database.execute("VACUUM")
        return True

    def _ask(self, what: str, **asked: Any) -> Any:
        answer = call(f"{self.url}/api/{what}", {"project": self.project, **asked})
        return answer["data"] if isinstance(answer, dict) and "data" in answer else answer

    def last(self, run: str, metric: str, step: int) -> float | None:
        with contextlib.suppress(urllib.error.HTTPError):
            found = self._ask("get_metric_values", run=run, metric_name=metric, step=step)
            return found[-1]["value"] if found else None
        return None

    def chart(self, run: str, metric: str) -> int:
        runs = [{"run": run, "run_id": None}]
        answers = self._ask("get_logs_batch", runs=runs, max_points=3000, scalar_only=True)
        return len(answers[0]["logs"])

    def latest(self, run: str, names: Sequence[str]) -> int:
        query = "SELECT metrics FROM metrics ORDER BY id DESC LIMIT 1"
        answer = self._ask("query_project", query=query)
        return len(json.loads(answer["rows"][0]["metrics"]))

    def readable(self, run: str, names: Sequence[str]) -> int:
        with contextlib.suppress(urllib.error.HTTPError):
            return sum(len(self._ask("get_metric_values", run=run, metric_name=name)) for name in names)
        return 0


class Tensorboard(Tool):
    name = "tensorboard"
    # Its own writer, `tensorboard.summary.Writer`, is the one that torch's and other writers build on.
    requirements = ("tensorboard",)
    has_server = False
    ready_path = "/data/environment"

    def command(self) -> list[str]:
        (self.folder / "logs").mkdir(exist_ok=True)
        options = [
            "--reload_interval",
            "1",
            *(["--samples_per_plugin", "scalars=10000000"] if self.mode else []),
        ]
        command = [str(self.bin / "tensorboard"), "--logdir", str(self.folder / "logs"), *options]
        return [*command, "--host", "127.0.0.1", "--port", str(self.port)]

    def stored_bytes(self) -> int:
        return bytes_in(self.folder / "logs")

    def _series(self, run: str, names: Sequence[str]) -> list[list[dict[str, Any]]]:
        asked = json.dumps([{"plugin": "scalars", "tag": name} for name in names])
        path = "/experiment/defaultExperimentId/data/plugin/timeseries/timeSeries"
        body = urllib.parse.urlencode({"requests": asked}).encode()
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, data=body), timeout=300
        ) as answer:
            found = json.loads(answer.read())
        return [(each.get("runToSeries") or {}).get(run) or [] for each in found]

    def last(self, run: str, metric: str, step: int) -> float | None:
        [series] = self._series(run, [metric])
        return series[-1]["value"] if series and series[-1]["step"] == step else None

    def chart(self, run: str, metric: str) -> int:
        return len(self._series(run, [metric])[0])

    def latest(self, run: str, names: Sequence[str]) -> int:
        return sum(bool(series) for series in self._series(run, names))

    def readable(self, run: str, names: Sequence[str]) -> int:
        return sum(map(len, self._series(run, names)))


class Aim(Tool):
    name = "aim"
    requirements = ("aim==3.29.1",)
    has_server = False
    ready_path = "/api/projects/"

    def __init__(self, mode: str, folder: Path, environments: Path) -> None:
        super().__init__(mode, folder, environments)
        command = [str(self.bin / "aim"), "init", "--repo", str(folder), "-y"]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)

    def command(self) -> list[str]:
        command = [str(self.bin / "aim"), "up", "--host", "127.0.0.1", "--port", str(self.port)]
        return [*command, "--repo", str(self.folder), "-y"]

    def stored_bytes(self) -> int:
        return bytes_in(self.folder / ".aim")

    def _series(self, run: str, names: Sequence[str]) -> list[dict[str, Any]]:
        asked = [{"name": name, "context": {}} for name in names]
        found: list[dict[str, Any]] = call(f"{self.url}/api/runs/{run}/metric/get-batch/", asked)
        return found

    def last(self, run: str, metric: str, step: int) -> float | None:
        with contextlib.suppress(urllib.error.HTTPError):
            found = self._series(run, [metric])
            return found[0]["values"][-1] if found and found[0]["iters"][-1:] == [step] else None
        return None

    def chart(self, run: str, metric: str) -> int:
        return len(self._series(run, [metric])[0]["iters"])

    def latest(self, run: str, names: Sequence[str]) -> int:
        return len(self._series(run, names))

    def readable(self, run: str, names: Sequence[str]) -> int:
        # It answers with 200 points at most, the last one among them; steps are logged one after another.
        with contextlib.suppress(urllib.error.HTTPError):
            return sum(series["iters"][-1] for series in self._series(run, names) if series["iters"])
        return 0


TOOLS: dict[str, type[Tool]] = {tool.name: tool for tool in (Gradiometer, Mlflow, Trackio, Tensorboard, Aim)}
