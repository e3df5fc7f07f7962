"""An uplink that dies in the last seconds of a run: the run is delivered all the same, and nobody waits for the dead."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradiometer as gm
from gradiometer import uplink
from gradiometer.uplink.state import read_state
from tests.faults.ingest_double import IngestDouble
from tests.support.eventually import eventually
from tests.support.recorded import recorded


@pytest.fixture
def double() -> Iterator[IngestDouble]:
    double = IngestDouble().start()
    yield double
    double.stop()


def kill_uplink(attempt_directory: Path) -> None:
    state = eventually(lambda: read_state(attempt_directory), what="an uplink")
    with contextlib.suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGKILL)
    eventually(lambda: not uplink.is_running(attempt_directory), what="the uplink is dead")


def opened(double: IngestDouble) -> tuple[gm.Run, Path]:
    run = gm.init(url=double.url)
    assert run.directory is not None
    run.log({"train/loss": 1.0})
    eventually(lambda: len(double.model.records()) >= 2, what="the first point")
    return run, run.directory.parent


def test_an_uplink_killed_just_before_finish_is_replaced(double: IngestDouble, spool: Path) -> None:
    run, attempt_directory = opened(double)
    kill_uplink(attempt_directory)
    run.log({"train/loss": 0.5})
    started_s = time.monotonic()
    run.finish()
    assert time.monotonic() - started_s < 8.0
    assert [exit["code"] for exit in double.model.exits()] == [0]
    eventually(lambda: not attempt_directory.exists(), what="the spool is removed")


def test_an_uplink_killed_during_finish_is_replaced(double: IngestDouble, spool: Path) -> None:
    run, attempt_directory = opened(double)
    # It delivers, and is never answered; so `finish` waits for it.
    double.behaviour.mute = True
    killer = threading.Timer(1.0, lambda: kill_uplink(attempt_directory))
    run.log({"train/loss": 0.5})
    killer.start()
    threading.Timer(1.2, lambda: setattr(double.behaviour, "mute", False)).start()
    started_s = time.monotonic()
    run.finish()
    killer.join()
    assert 1.0 < time.monotonic() - started_s < 9.0
    assert [exit["code"] for exit in double.model.exits()] == [0]
    assert double.model.num_repeats == 0


def test_an_uplink_that_dies_and_cannot_start_again_is_not_waited_for(
    double: IngestDouble, spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, attempt_directory = opened(double)
    kill_uplink(attempt_directory)
    # What its process reads, and `init` checked when it was right.
    monkeypatch.setenv("GRADIOMETER_LINGER_S", "for ever")
    started_s = time.monotonic()
    run.finish()
    assert time.monotonic() - started_s < 8.0
    assert "records are still in the spool" in caplog.text
    assert recorded(attempt_directory / "rank-00000").events[-1].kind == "exit"


SCRIPT = """
import os, signal, sys
import gradiometer as gm
from gradiometer import uplink
from gradiometer.uplink.state import read_state
run = gm.init()
folder = run.directory.parent
run.log({"train/loss": 1.0})
while not (state := read_state(folder)) or state.acked.get(0, 0) < 2:
    pass
os.kill(state.pid, signal.SIGKILL)
while uplink.is_running(folder):
    pass
run.log({"train/loss": 0.5})
END
"""


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("", {"code": 0, "signal": None}),
        ("sys.exit(3)", {"code": 3, "signal": None}),
        ("raise ValueError('late')", {"code": 1, "signal": None}),
        ("os.kill(os.getpid(), signal.SIGTERM)", {"code": None, "signal": "SIGTERM"}),
    ],
    ids=["nothing", "exit", "exception", "sigterm"],
)
def test_however_the_process_ends_after_its_uplink(
    double: IngestDouble, spool: Path, end: str, told: dict[str, object]
) -> None:
    settings = {**os.environ, "GRADIOMETER_URL": double.url}
    script = SCRIPT.replace("END", end)
    done = subprocess.run(
        [sys.executable, "-c", script], env=settings, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == {"SIGTERM": -signal.SIGTERM}.get(str(told["signal"]), told["code"])
    [exit] = eventually(double.model.exits, what="the exit event")
    assert {name: exit[name] for name in told} == told, done.stderr
