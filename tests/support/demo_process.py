"""The real `gradiometer demo` as a child process, read through its output and the server's REST interface."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from tests.support.eventually import eventually

URL = re.compile(r"Gradiometer is at (http://\S+)")
RUN = re.compile(r"gradiometer: run (\S+) \(")
OVER = "The training is over"
START_TIMEOUT_S = 90.0
TRAINING_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0


class DemoProcess:
    """Use it as a context manager; leaving it kills a demo that still runs, and fails the test's leak check."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._log = folder / "demo.log"
        self._command = [sys.executable, "-m", "gradiometer", "demo", "--no-browser"]
        self._command += ["--database", f"sqlite:///{folder / 'demo.db'}", *arguments]
        self._environment = {
            **os.environ,
            "GRADIOMETER_SPOOL": str(folder / "spool"),
            "PYTHONUNBUFFERED": "1",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DemoProcess:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if error is not None:
            print(self.output)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        return self.printed(URL, START_TIMEOUT_S)

    @property
    def run_id(self) -> str:
        return self.printed(RUN, START_TIMEOUT_S)

    def printed(self, pattern: re.Pattern[str], timeout_s: float) -> str:
        """First group of `pattern` in the output, once it is there; fails if the demo ends before."""

        def found() -> str | None:
            match = pattern.search(self.output)
            if match is None:
                assert self._process is not None
                code = self._process.poll()
                if code is not None:
                    raise RuntimeError(f"the demo ended with exit code {code}:\n{self.output}")
            return match[1] if match else None

        return str(eventually(found, timeout_s, what=pattern.pattern, interval_s=0.1))

    def wait_for_the_end_of_training(self) -> None:
        self.printed(re.compile(f"({OVER})"), TRAINING_TIMEOUT_S)

    def interrupt(self) -> int:
        """Press Ctrl-C and return the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(END_TIMEOUT_S)

    def kill(self) -> list[psutil.Process]:
        """Kill it alone, as the kernel's out-of-memory killer does; returns what it had started, its uplink included."""
        assert self._process is not None
        family = psutil.Process(self._process.pid).children(recursive=True)
        mark = str(self._log.parent)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process not in family and any(mark in part for part in process.cmdline()[4:]):
                    family.append(process)
        self._process.kill()
        self._process.wait()
        return [process for process in family if process.pid != self._process.pid]

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(TRAINING_TIMEOUT_S)

    def get(self, path: str, **params: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1{path}", params=params, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def alerts(self) -> list[dict[str, Any]]:
        return list(self.get(f"/runs/{self.run_id}/alerts")["alerts"])
