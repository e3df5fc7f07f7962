"""A PostgreSQL cluster of the tests' own: real server, fsync on, in a temporary folder, on a free loopback port."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import psycopg

from tests.support.eventually import eventually
from tests.support.programs import find_postgres

SUPERUSER = "gradiometer_test"


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgresCluster:
    """Starts on construction; `close()` stops it and removes its files."""

    def __init__(self) -> None:
        self._bin = find_postgres()
        self._account = _unprivileged_account()
        # Not below pytest's own temporary folder: that one belongs to root and the server must not.
        self.folder = Path(tempfile.mkdtemp(prefix="gradiometer-pg-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._num_databases = 0
        try:
            self._create()
            self.start()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        if self._account is not None:
            shutil.chown(self.folder, self._account, self._account)
        command = [str(self._bin / "initdb"), "--pgdata", str(self._data), "--username", SUPERUSER]
        command += ["--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-instructions"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **self._as_account())
        if done.returncode != 0:
            raise RuntimeError(f"initdb failed: {done.stderr or done.stdout}")

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _as_account(self) -> dict[str, object]:
        environment = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
        keywords: dict[str, object] = {"env": environment, "cwd": self.folder, "stdin": subprocess.DEVNULL}
        if self._account is not None:
            keywords |= {"user": self._account, "group": self._account, "extra_groups": []}
        return keywords

    def start(self) -> None:
        """Start (again) on a free port; returns when it answers."""
        self.port = free_port()
        command = [str(self._bin / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        for setting in (
            "listen_addresses=127.0.0.1",
            f"unix_socket_directories={self.folder}",
            "fsync=on",
            "synchronous_commit=on",
            "max_connections=50",
            "shared_buffers=32MB",
        ):
            command += ["-c", setting]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, **self._as_account())
        eventually(self._answers, 30, what="PostgreSQL answers")

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"PostgreSQL did not start: {self.log()}")
        try:
            psycopg.connect(self.address("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError as error:
            raise AssertionError(str(error)) from error
        return True

    def address(self, database: str) -> str:
        """Connection string in libpq's own form."""
        return f"postgresql://{SUPERUSER}@127.0.0.1:{self.port}/{database}"

    def create_database(self) -> str:
        """Create an empty database and return its URL as the server's settings want it."""
        self._num_databases += 1
        name = f"test_{self._num_databases}"
        with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return self.address(name).replace("postgresql://", "postgresql+psycopg://", 1)

    def drop_database(self, url: str) -> None:
        """Drop a database of `create_database`, ending connections that a killed server left behind."""
        name = url.rpartition("/")[2]
        with psycopg.connect(self.address("postgres"), autocommit=True) as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def stop(self) -> None:
        """Fast shutdown; the files stay, and `start` brings it back (on another port)."""
        process, self._process = self._process, None
        if process is None:
            return
        for number, patience_s in ((signal.SIGINT, 20), (signal.SIGQUIT, 10), (signal.SIGKILL, 10)):
            process.send_signal(number)
            try:
                process.wait(patience_s)
                return
            except subprocess.TimeoutExpired:
                continue

    def log(self) -> str:
        """The server's log so far."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """Stop and remove everything."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _unprivileged_account() -> str | None:
    """PostgreSQL refuses to run as root; the distribution's package brings this account."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    raise RuntimeError(
        "PostgreSQL cannot run as root, and there is neither a `postgres` nor a `nobody` account."
    )
