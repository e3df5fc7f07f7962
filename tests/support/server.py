"""A real Gradiometer server: its own process, its own port, its own database."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.support.eventually import eventually

URL_LINE = re.compile(r"Gradiometer is at https?://[^\s/]+:(\d+)")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
"""A little more than the server gives itself."""


class Server:
    """`python -m gradiometer_server serve`, started by `start()` and ended by the fixture that made it.

    Attributes:
        url: e.g. `http://127.0.0.1:41234`; stays the same over `restart()`.
        database_url: what the server was given.
    """

    def __init__(
        self, database_url: str, folder: Path, *, arguments: list[str], environment: dict[str, str]
    ) -> None:
        self.database_url = database_url
        self.port = 0
        self._log_path = folder / "server.log"
        self._arguments = arguments
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL of the running server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that the server has printed, over all its starts."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def start(self) -> Server:
        """Start on a free port, or on the port of the last time; returns when it is ready to serve."""
        self.launch()
        skip = self._printed_before
        port = eventually(lambda: self._printed_port(skip), START_TIMEOUT_S, what="the server prints its URL")
        self.port = port
        eventually(self._is_ready, START_TIMEOUT_S, what=f"{self.url}/readyz answers 200")
        return self

    def launch(self) -> None:
        """Start the process without waiting: for tests of servers that refuse to start."""
        assert self._process is None, "the server is already running"
        command = [sys.executable, "-m", "gradiometer_server", "serve", "--port", str(self.port)]
        command += self._arguments
        environment = {**os.environ, "GRADIOMETER_DATABASE_URL": self.database_url, **self._environment}
        self._printed_before = len(self.log)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def _printed_port(self, skip: int) -> int:
        assert self._process is not None
        if self._process.poll() is not None:
            code = self._process.wait()
            self._process = None
            raise RuntimeError(f"the server ended with exit code {code}:\n{self.log[skip:]}")
        found = URL_LINE.search(self.log, skip)
        return int(found[1]) if found else 0

    def _is_ready(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/readyz", timeout=5, headers=self.headers)
        except httpx.TransportError as error:
            raise AssertionError(f"{error!r}\n{self.log[-2000:]}") from error
        return answer.status_code == 200

    @property
    def headers(self) -> dict[str, str]:
        """Authorization, if the server was started with a token."""
        token = self._environment.get("GRADIOMETER_TOKEN")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str, **params: Any) -> Any:
        """GET `/api/v1{path}` and return the decoded answer; anything but 200 fails the test."""
        answer = httpx.get(f"{self.url}/api/v1{path}", params=params, headers=self.headers, timeout=30)
        assert answer.status_code == 200, f"GET {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def post(self, path: str, body: object) -> Any:
        """POST JSON to `/api/v1{path}` and return the decoded answer; anything but 200 fails the test."""
        answer = httpx.post(f"{self.url}/api/v1{path}", json=body, headers=self.headers, timeout=30)
        assert answer.status_code == 200, f"POST {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def kill(self) -> None:
        """SIGKILL, as by the kernel's out-of-memory killer: nothing is flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM and wait; returns the exit code. A server that does not stop in time fails the test."""
        return self._end(signal.SIGTERM)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait until a server that was only launched ends by itself; returns the exit code."""
        process, self._process = self._process, None
        assert process is not None, "the server is not running"
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process = process
            raise

    def restart(self) -> Server:
        """Start again on the same port and database, after `kill()` or `stop()`, or stopping it now."""
        if self._process is not None:
            self.stop()
        return self.start()

    def close(self) -> None:
        """End it whatever its state; for teardown."""
        if self._process is None:
            return
        try:
            self.stop()
        except AssertionError:
            self.kill()
            raise

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        assert process is not None, "the server is not running"
        process.send_signal(number)
        try:
            code = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the server did not end within {STOP_TIMEOUT_S} s of {number.name}"
            ) from None
        self._process = None
        return code
