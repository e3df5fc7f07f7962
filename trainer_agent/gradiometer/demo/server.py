"""The demo's own server: a child process that lives exactly as long as the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Final

from gradiometer.demo.data import DemoError

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0
_URL = re.compile(r"https?://\S+")


class ServerProcess:
    """`python -m gradiometer_server serve` on this machine; use it as a context manager.

    Args:
        port: 0 for any free one.
        database: SQLAlchemy URL; None: the server's own default, one SQLite file of the user.
        stop: set by whoever wants the demo to end; `start` gives up then.
    """

    def __init__(self, *, port: int, database: str | None, stop: threading.Event) -> None:
        self._command = [sys.executable, "-m", "gradiometer_server", "serve", "--quiet", "--until-stdin-ends"]
        self._command += ["--host", "127.0.0.1", "--port", str(port)]
        self._command += ["--database", database] if database else []
        self._stop = stop
        self._url: str | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> ServerProcess:
        # A session of its own: Ctrl-C in the terminal reaches only the demo, which then stops things in order.
        self._process = subprocess.Popen(
            self._command,
            # Never written to: it ends with the demo, by whatever signal that dies, and the server with it.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read_output, name="demo-server-output", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join(1.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def wait_until_listening(self) -> str | None:
        """Base URL of the server, without a slash at the end; None if the demo was stopped meanwhile.

        Raises:
            DemoError: the server ended, or did not listen in time.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._url is None:
            if self._stop.wait(0.05):
                return None
            if (code := self.exit_code()) is not None:
                raise DemoError(f"the server did not start (exit code {code}); its own message is above")
            if time.monotonic() > deadline_s:
                raise DemoError(
                    f"the server did not listen within {START_TIMEOUT_S:g} s; start it alone to see why"
                )
        return self._url

    def exit_code(self) -> int | None:
        """Exit code of a server that ended by itself; None while it runs."""
        return None if self._process is None else self._process.poll()

    def _read_output(self) -> None:
        """Find the URL, and keep reading so that the server never waits for a full pipe."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._url is None and (found := _URL.search(line)):
                self._url = found[0].rstrip("/")
