"""Fixtures for all tests: real databases, real servers, and a check that nothing outlives its test."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.postgres import PostgresCluster
from tests.support.server import Server

LEAK_PATIENCE_S = 5.0

for name in [name for name in os.environ if name.startswith("GRADIOMETER_") and "_TEST_" not in name]:
    # A developer's own settings must not reach the servers and agents under test.
    del os.environ[name]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and every child would inherit it: Ctrl-C could not be tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_process_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a process running, and end that process."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(leaks.MARK, mark)
    yield
    leaked = leaks.end_leaked(mark, patience_s=LEAK_PATIENCE_S)
    assert not leaked, "processes outlived the test (now killed):\n" + "\n".join(leaked)


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[PostgresCluster]:
    """A PostgreSQL server for this test session (one per xdist worker)."""
    cluster = PostgresCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def postgres_url(postgres_cluster: PostgresCluster) -> Iterator[str]:
    """URL of a new, empty PostgreSQL database."""
    url = postgres_cluster.create_database()
    yield url
    postgres_cluster.drop_database(url)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'gradiometer.db'}"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of a new, empty database; the test runs once on each kind."""
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


@pytest.fixture
def server(
    tmp_path: Path, sqlite_url: str, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Server]]:
    """Factory of running servers: `server(database_url=..., arguments=[...], environment={...}, start=True)`.

    Without arguments: SQLite, a free loopback port. All are ended at teardown; if the test failed, their logs are
    part of its report.
    """
    made: list[Server] = []

    def make(
        database_url: str = sqlite_url,
        *,
        arguments: list[str] | None = None,
        environment: dict[str, str] | None = None,
        start: bool = True,
    ) -> Server:
        folder = tmp_path / f"server-{len(made)}"
        folder.mkdir()
        one = Server(database_url, folder, arguments=arguments or [], environment=environment or {})
        made.append(one)
        return one.start() if start else one

    yield make
    problems = []
    for one in made:
        try:
            one.close()
        except AssertionError as error:
            problems.append(str(error))
        request.node.add_report_section("teardown", "server log", one.log[-20_000:])
    assert not problems, "\n".join(problems)


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spool folder of the test's own, named in the environment; `GRADIOMETER_URL` points nowhere until set."""
    folder = tmp_path / "spool"
    monkeypatch.setenv("GRADIOMETER_SPOOL", str(folder))
    monkeypatch.setenv("GRADIOMETER_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("GRADIOMETER_LINGER_S", "1")
    return folder
