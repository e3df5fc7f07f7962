"""What keeps the data from the server is told to the person who trains, not only to a log file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gradiometer as gm
from tests.support.server import Server

TRAINING = """
import threading
import gradiometer as gm
run = gm.init(project="trouble")
for step in range(45):
    run.log({"train/loss": 1.0 / (1 + step)})
    threading.Event().wait(0.1)
run.finish(deadline_s=0.5)
print("trained")
"""


def outcome(url: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "GRADIOMETER_URL": url, "GRADIOMETER_LINGER_S": "0.5", **environment}
    command = [sys.executable, "-c", TRAINING]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=True)


def test_a_wrong_token_is_told_while_training_and_at_the_end(
    server: Callable[..., Server], spool: Path
) -> None:
    one = server(environment={"GRADIOMETER_TOKEN": "the-right-token-of-this-server"})
    done = outcome(one.url, GRADIOMETER_TOKEN="another-token-altogether")
    assert done.stdout.endswith("trained\n")
    told = [line for line in done.stderr.splitlines() if line.startswith("gradiometer: not delivered yet")]
    assert len(told) == 1, done.stderr
    assert "GRADIOMETER_TOKEN" in told[0]
    last = done.stderr.splitlines()[-1]
    assert "records are still in the spool" in last
    assert "GRADIOMETER_TOKEN" in last
    assert list(spool.rglob("*.seg"))


def test_a_server_that_is_away_is_told_once(spool: Path) -> None:
    done = outcome("http://127.0.0.1:1")
    assert done.stdout.endswith("trained\n")
    assert done.stderr.count("not delivered yet") == 1, done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "They are sent as soon as that is mended" in done.stderr


@pytest.mark.parametrize("text", ["abc", "-3", "nan"])
@pytest.mark.parametrize("variable", ["GRADIOMETER_LINGER_S", "GRADIOMETER_SPOOL_MAX_BYTES"])
def test_a_limit_that_is_no_number_is_refused_by_init(
    monkeypatch: pytest.MonkeyPatch, spool: Path, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=variable):
        gm.init(project="trouble")
    assert not spool.exists()


TWICE = """
import gradiometer as gm, sys
run = gm.init(project="trouble", run_id="twice")
for step in range(3):
    run.log({"train/loss": float(sys.argv[1])})
run.finish(deadline_s=10)
"""


def test_two_processes_that_call_themselves_the_same_rank_are_told_apart(
    server: Callable[..., Server], spool: Path, tmp_path: Path
) -> None:
    one = server()

    def train(value: str, folder: Path) -> str:
        settings = {
            **os.environ, "GRADIOMETER_URL": one.url, "GRADIOMETER_LINGER_S": "0.5", "GRADIOMETER_ATTEMPT": "1800000000000",
            "GRADIOMETER_SPOOL": str(folder),
        }  # fmt: skip
        command = [sys.executable, "-c", TWICE, value]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, check=True)
        return done.stderr

    first = train("1.0", spool)
    assert "spool" not in first
    told = train("2.0", tmp_path / "other-spool")
    assert "written by two processes" in told
    assert "RANK" in told
    assert "sent as soon as" not in told, "they never are"
    assert list((tmp_path / "other-spool").rglob("*.seg")), "what was not taken is kept"
    assert one.get("/runs/twice")["rejected_records"] >= 1
