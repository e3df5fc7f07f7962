"""What an orderly end of the interpreter is recorded as: the code that the process really ends with, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gradiometer import cli
from gradiometer.uplink.state import read_state
from tests.faults.ingest_double import IngestDouble
from tests.support.eventually import eventually

PREAMBLE = """
import atexit, os, sys
import gradiometer as gm
{before}
run = gm.init(run_id="life")
run.log({{"train/loss": 1.0}})
"""


@pytest.fixture
def double() -> Iterator[IngestDouble]:
    double = IngestDouble().start()
    yield double
    double.stop()


def start(body: str, double: IngestDouble, spool: Path, *, before: str = "") -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "GRADIOMETER_URL": double.url,
        "GRADIOMETER_SPOOL": str(spool),
        "GRADIOMETER_LINGER_S": "0.5",
    }
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE.format(before=before) + textwrap.dedent(body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def told(exit: dict[str, object]) -> dict[str, object]:
    return {name: exit[name] for name in ("code", "signal", "inferred")}


CAUGHT = """
try:
    sys.exit(3)
except SystemExit:
    pass
"""
ENDS = [
    ("raise SystemExit(3)", "", 3),
    ("exit(3)", "", 3),
    ("quit()", "", 0),
    (CAUGHT, "", 0),
    ("sys.exit(3)", "", 3),
    ("sys.exit('no data')", "", 1),
    ("", "", 0),
    ("raise ValueError('bad batch')", "", 1),
    ("run.finish(4)", "", 4),
    # Handlers that run after the agent's own.
    ("", "atexit.register(os._exit, 6)", 6),
    ("", "atexit.register(os.abort)", -signal.SIGABRT),
]


@pytest.mark.parametrize(("body", "before", "code"), ENDS)
def test_the_code_of_the_process_is_recorded(
    body: str, before: str, code: int, double: IngestDouble, tmp_path: Path
) -> None:
    trainer = start(body, double, tmp_path / "spool", before=before)
    trainer.communicate(timeout=60)
    ended_s = time.monotonic()
    exits = eventually(double.model.exits, 5.0, what="the exit event")
    assert time.monotonic() - ended_s < 2.0
    # finish(4) is the loop's own word on how the run went.
    assert trainer.returncode == (0 if "finish" in body else code)
    expected = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": "SIGABRT"}
    assert [told(exit) for exit in exits] == [{**expected, "inferred": False}]
    eventually(lambda: not list((tmp_path / "spool").iterdir()), what="the spool is removed")


def test_what_was_logged_is_delivered_before_the_process_ends(double: IngestDouble, tmp_path: Path) -> None:
    trainer = start(
        "raise SystemExit(3)", double, tmp_path / "spool", before="atexit.register(sys.stdin.read)"
    )
    # The process now waits in a handler that runs after the agent's.
    eventually(lambda: len(double.model.records()) == 2, 20.0, what="the schema and the point")
    eventually(lambda: list((tmp_path / "spool").glob("life/*/rank-00000/last_words.json")))
    assert double.model.exits() == [], "it has not ended yet"
    trainer.communicate("", timeout=30)
    assert told(eventually(double.model.exits, what="the exit event")[0])["code"] == 3


@pytest.mark.parametrize(("body", "code"), [("sys.exit(3)", 3), ("raise ValueError('bad batch')", 1)])
def test_without_an_uplink_that_saw_it_the_trainer_says_what_it_expects(
    body: str, code: int, double: IngestDouble, tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    trainer = start(f"sys.stdin.read()\n{body}", double, spool)
    attempt = eventually(lambda: next(iter(spool.glob("life/*")), None), 20.0)
    pid = eventually(lambda: (state := read_state(attempt)) and state.pid)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(pid))
    trainer.communicate(timeout=60)
    assert trainer.returncode == code
    # `finish` starts another uplink, which delivers what the trainer itself says.
    exits = eventually(double.model.exits, what="the exit event")
    assert [told(exit) for exit in exits] == [{"code": code, "signal": None, "inferred": code == 3}]


def test_last_words_outlive_an_uplink_that_was_killed_with_its_trainer(
    double: IngestDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = tmp_path / "spool"
    # Said when the agent's own handler is through, and looks after its uplink no longer.
    before = "atexit.register(lambda: (print('left', flush=True), sys.stdin.read()))"
    trainer = start("sys.exit(3)", double, spool, before=before)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "left\n"
    [words] = spool.glob("life/*/rank-00000/last_words.json")
    state = read_state(words.parents[1])
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(state.pid))
    trainer.communicate(timeout=60)
    assert cli.main(["sync", str(spool), "--url", double.url]) == 0
    assert [told(exit) for exit in double.model.exits()] == [{"code": 3, "signal": None, "inferred": True}]
