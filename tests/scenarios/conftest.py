"""One real server for all scenarios of a file, and an agent that reports to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server with SQLite; each test has runs of its own in it."""
    folder = tmp_path_factory.mktemp("scenarios")
    server = Server(f"sqlite:///{folder / 'gradiometer.db'}", folder, arguments=[], environment={})
    yield server.start()
    log = server.log
    server.close()
    assert "Traceback" not in log, log


@pytest.fixture
def agent(one: Server, spool: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, to which a `gradiometer.init` of this test reports."""
    monkeypatch.setenv("GRADIOMETER_URL", one.url)
    return one
