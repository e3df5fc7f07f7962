"""The real server beside a benchmark, and what processes use: CPU time and memory, as /proc tells them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

MIB = 1024 * 1024
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


class Server:
    """`python -m gradiometer_server serve` on loopback; a context manager, or `start` and `stop`, any number of times.

    Args:
        folder: for its output, and for `benchmark.db` unless `database` says otherwise.
        database: SQLAlchemy URL.
        arguments: more options of `serve`.
    """

    def __init__(self, folder: Path, *, database: str | None = None, arguments: tuple[str, ...] = ()) -> None:
        self._log = folder / "server.log"
        self.database = database or f"sqlite:///{folder / 'benchmark.db'}"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def start(self) -> Server:
        """Start; returns once it answers.

        Raises:
            RuntimeError: with what it printed, if it ends or is not ready in time.
        """
        command = [sys.executable, "-m", "gradiometer_server", "serve", "--port", str(self.port)]
        environment = {**os.environ, "GRADIOMETER_DATABASE_URL": self.database}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(self._is_ready, "the server is ready", timeout_s=START_TIMEOUT_S)
        except TimeoutError as error:
            self.kill()
            raise RuntimeError(self._log.read_text()) from error
        return self

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(self._log.read_text())
        try:
            urllib.request.urlopen(f"{self.url}/readyz", timeout=5).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL: nothing is flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help in time."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def get(self, path: str) -> Any:
        """The decoded answer to `GET /api/v1<path>`."""
        return call(f"{self.url}/api/v1{path}")

    def post(self, path: str, body: object) -> Any:
        """The decoded answer to a POST of JSON."""
        return call(f"{self.url}/api/v1{path}", body)


def call(url: str, body: object = None) -> Any:
    """One request, JSON both ways, on a connection of its own."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def free_port() -> int:
    """A port of the loopback interface that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(
    condition: Callable[[], bool], what: str, *, timeout_s: float = 300.0, every_s: float = 0.05
) -> None:
    """Ask again and again.

    Raises:
        TimeoutError: naming `what`.
    """
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        pause.wait(every_s)


def descendants(pid: int) -> list[int]:
    """Living child processes, and theirs; nobody where /proc does not tell."""
    found, pending = [], [pid]
    while pending:
        parent = pending.pop()
        try:
            lists = [(task / "children").read_text() for task in Path(f"/proc/{parent}/task").iterdir()]
        except OSError:
            continue
        children = [int(child) for text in lists for child in text.split()]
        found += children
        pending += children
    return found


def cpu_s(*pids: int) -> float:
    """CPU seconds of living processes together, without children that they have waited for."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """CPU seconds that all cores together have spent on anything since the machine started; 0 without /proc."""
    try:
        ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0.0
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int, *, peak: bool = False) -> float:
    """Resident memory of one process, or the most that it ever had; 0 where /proc does not tell."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(wanted)), 0.0)


def bytes_in(folder: Path | None) -> int:
    """Size of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder else 0
