"""The uplink process: one per attempt, outlives its trainer, tells how that ended, and ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gradiometer import cli, spool, uplink, wire
from gradiometer.uplink.state import read_state
from tests.faults.ingest_double import IngestDouble
from tests.faults.trainer_program import ATTEMPT
from tests.support.eventually import eventually

REPOSITORY = Path(__file__).resolve().parents[2]
EXIT = wire.encode(wire.Event(kind="exit", time=0.0, attributes={"code": 0}))

Trainer = subprocess.Popen[bytes]
StartTrainer = Callable[..., Trainer]


@pytest.fixture
def double() -> Iterator[IngestDouble]:
    double = IngestDouble().start()
    yield double
    double.stop()


@pytest.fixture
def start_trainer(
    tmp_path: Path, double: IngestDouble, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartTrainer]:
    """Starts `trainer_program`; its spool is `tmp_path / "spool"`."""
    monkeypatch.setenv("GRADIOMETER_LINGER_S", "0.5")
    started: list[Trainer] = []

    def start(end: str, *, rank: int = 0, steps: int = 20, root: Path | None = None) -> Trainer:
        spool_root = str(root or tmp_path / "spool")
        command = [sys.executable, "-m", "tests.faults.trainer_program"]
        command += [spool_root, double.url, "run", str(rank), str(steps), end]
        trainer = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        started.append(trainer)
        return trainer

    yield start
    for trainer in started:
        trainer.kill()
        trainer.wait()
        assert trainer.stdout is not None
        trainer.stdout.close()


def attempt_directory(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "run" / str(ATTEMPT)


def wait_for_record(trainer: Trainer, seq: int) -> None:
    assert trainer.stdout is not None
    while int(trainer.stdout.readline()) < seq:
        pass


def uplink_pid(tmp_path: Path) -> int:
    return eventually(lambda: (state := read_state(attempt_directory(tmp_path))) and state.pid)


ENDS = [
    ("sigterm", {"code": None, "signal": "SIGTERM", "inferred": False}),
    ("segfault", {"code": None, "signal": "SIGSEGV", "inferred": False}),
    ("_exit", {"code": 3, "signal": None, "inferred": False}),
    ("exit", {"code": 2, "signal": None, "inferred": False}),
    ("exception", {"code": 1, "signal": None, "inferred": False}),
    ("nothing", {"code": 0, "signal": None, "inferred": False}),
    ("normal", {"code": 0, "signal": None, "inferred": False}),
]


@pytest.mark.parametrize(("end", "told"), ENDS)
def test_every_end_of_a_trainer_is_told_once(
    end: str, told: dict[str, object], start_trainer: StartTrainer, double: IngestDouble
) -> None:
    start_trainer(end)
    exits = eventually(double.model.exits, what="the exit event")
    assert len(exits) == 1
    assert {key: exits[0][key] for key in told} == told
    assert exits[0]["reason"]
    assert len(double.model.records()) == 22


@pytest.mark.parametrize("attempt", range(4))
def test_a_trainer_that_ends_at_once_and_is_reaped_at_once_is_told_truly(
    attempt: int, start_trainer: StartTrainer, double: IngestDouble
) -> None:
    trainer = start_trainer("_exit", steps=1)
    assert trainer.wait() == 3
    exits = eventually(double.model.exits, what="the exit event")
    assert (exits[0]["code"], exits[0]["inferred"]) == (3, False)


def test_a_killed_trainer_is_reported_within_two_seconds(
    start_trainer: StartTrainer, double: IngestDouble, tmp_path: Path
) -> None:
    trainer = start_trainer("wait", steps=0)
    wait_for_record(trainer, 30)
    trainer.kill()
    killed_s = time.monotonic()
    exits = eventually(double.model.exits, 2.0, what="the exit event")
    assert time.monotonic() - killed_s < 2.0
    assert (exits[0]["signal"], exits[0]["inferred"]) == ("SIGKILL", False)
    eventually(lambda: not list((tmp_path / "spool").iterdir()), what="the spool is removed")


def test_ctrl_c_in_the_terminal_ends_the_trainer_alone(
    start_trainer: StartTrainer, double: IngestDouble
) -> None:
    trainer = start_trainer("wait", steps=0)
    wait_for_record(trainer, 10)
    os.killpg(trainer.pid, signal.SIGINT)
    exits = eventually(double.model.exits, what="the exit event")
    assert (exits[0]["signal"], exits[0]["inferred"]) == ("SIGINT", False)


def test_the_uplink_has_no_tie_to_its_trainer(start_trainer: StartTrainer, tmp_path: Path) -> None:
    trainer = start_trainer("wait")
    wait_for_record(trainer, 21)
    process = psutil.Process(uplink_pid(tmp_path))
    assert process.ppid() != trainer.pid
    assert os.getsid(process.pid) != os.getsid(trainer.pid)
    assert process.cwd() == "/"
    files = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in (0, 1)]
    assert files == ["/dev/null", "/dev/null"]
    assert not [file for file in process.open_files() if file.path.endswith("fault.log")]


def test_the_ranks_of_a_node_share_one_uplink(
    start_trainer: StartTrainer, double: IngestDouble, tmp_path: Path
) -> None:
    trainers = [start_trainer("wait", rank=rank, steps=10) for rank in (0, 1)]
    for trainer in trainers:
        wait_for_record(trainer, 11)
    eventually(lambda: len(double.model.records(0)) == len(double.model.records(1)) == 11)
    mark = str(attempt_directory(tmp_path))
    uplinks = [process.pid for process in psutil.process_iter() if mark in _command_line(process)]
    assert uplinks == [uplink_pid(tmp_path)]
    assert double.num_connections == 1
    trainers[0].kill()
    eventually(lambda: double.model.exits(0), what="the exit event of rank 0")
    assert not double.model.exits(1)
    # Rank 1 still lives, so the uplink stays for it.
    trainers[1].send_signal(signal.SIGTERM)
    assert (
        eventually(lambda: double.model.exits(1), what="the exit event of rank 1")[0]["signal"] == "SIGTERM"
    )


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_folder_too_deep_for_a_socket_path_is_no_slower(
    start_trainer: StartTrainer, double: IngestDouble, tmp_path: Path
) -> None:
    root = tmp_path / ("d" * 100) / ("e" * 100)
    trainer = start_trainer("wait", root=root)
    wait_for_record(trainer, 21)
    assert uplink.wake(root / "run" / str(ATTEMPT))
    eventually(lambda: len(double.model.records()) == 21)


def test_R59_without_a_server_the_uplink_lingers_and_sync_delivers_later(
    start_trainer: StartTrainer, double: IngestDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    double.stop()
    trainer = start_trainer("wait")
    wait_for_record(trainer, 21)
    pid = uplink_pid(tmp_path)
    trainer.kill()
    trainer.wait()
    eventually(lambda: not psutil.pid_exists(pid), what="the uplink gives up after GRADIOMETER_LINGER_S")
    state = read_state(attempt_directory(tmp_path))
    assert state is not None
    assert "gradiometer serve" in state.last_error
    assert state.spooled == {0: 22}

    spool_root = str(tmp_path / "spool")
    assert cli.main(["sync", spool_root, "--url", double.url, "--patience", "0.5"]) == 1
    assert "NOT complete" in capsys.readouterr().out
    double.start()
    assert cli.main(["sync", spool_root, "--url", double.url]) == 0
    assert "sent 22 records of 1 ranks" in capsys.readouterr().out
    assert double.model.exits()[0]["signal"] == "SIGKILL"
    assert not list((tmp_path / "spool").iterdir())
    assert cli.main(["sync", spool_root, "--url", double.url]) == 0
    assert "Nothing waits" in capsys.readouterr().out


def test_sync_leaves_an_attempt_alone_that_has_an_uplink(
    start_trainer: StartTrainer, double: IngestDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = start_trainer("wait")
    wait_for_record(trainer, 21)
    assert cli.main(["sync", str(tmp_path / "spool"), "--url", double.url]) == 0
    assert f"uplink with pid {uplink_pid(tmp_path)}" in capsys.readouterr().out


def test_sync_says_who_tries_in_vain_to_deliver(
    start_trainer: StartTrainer, double: IngestDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    double.stop()
    trainer = start_trainer("wait")
    wait_for_record(trainer, 21)
    eventually(lambda: uplink.trouble(attempt_directory(tmp_path)), what="the uplink finds no server")
    # Another server would take it, but the uplink of the trainer knows nothing of that.
    assert cli.main(["sync", str(tmp_path / "spool"), "--url", "http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().out
    assert "NOT delivered" in told
    assert double.url in told
    assert f"kill {uplink_pid(tmp_path)}" in told


def test_a_trainer_that_died_unseen_is_recorded_by_inference(
    double: IngestDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str], start_trainer: StartTrainer
) -> None:
    trainer = start_trainer("wait")
    wait_for_record(trainer, 21)
    os.kill(uplink_pid(tmp_path), signal.SIGKILL)
    trainer.kill()
    trainer.wait()
    assert cli.main(["sync", str(tmp_path / "spool"), "--url", double.url]) == 0
    exits = double.model.exits()
    assert (exits[0]["signal"], exits[0]["inferred"]) == ("SIGKILL", True)
    assert "without a trace" in str(exits[0]["reason"])


def test_a_killed_uplink_is_noticed_and_replaced(double: IngestDouble, tmp_path: Path) -> None:
    run = wire.RunInfo(run_id="run", project="tests", name="run", created_s=1.0)
    writer = spool.open_source(tmp_path / "spool", run, wire.SourceInfo(rank=0, attempt=ATTEMPT))
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    writer.append(b"1")
    assert uplink.wait_delivered(writer.attempt_directory, 0, 1, 10.0)
    pid = uplink_pid(tmp_path)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not uplink.wake(writer.attempt_directory), what="nobody listens")
    writer.append(b"2")
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    assert uplink.wait_delivered(writer.attempt_directory, 0, 2, 10.0)
    assert double.model.records() == [b"1", b"2"]
    writer.append(EXIT)
    uplink.wake(writer.attempt_directory)
    writer.close()
    eventually(lambda: not writer.attempt_directory.exists(), what="the spool is removed")


def test_an_uplink_that_cannot_start_says_why(tmp_path: Path) -> None:
    run = wire.RunInfo(run_id="run", project="tests", name="run", created_s=1.0)
    writer = spool.open_source(tmp_path, run, wire.SourceInfo(rank=0, attempt=1))
    with pytest.raises(uplink.UplinkError, match=r"GRADIOMETER_URL is 'ftp://x'.*gradiometer sync"):
        uplink.ensure_running(writer.attempt_directory, url="ftp://x", token=None)
    writer.close()


def test_sigterm_gives_the_uplink_seconds_to_report_the_end(
    start_trainer: StartTrainer, double: IngestDouble, tmp_path: Path
) -> None:
    trainer = start_trainer("wait")
    wait_for_record(trainer, 21)
    # As batch systems do: every process at once.
    os.kill(uplink_pid(tmp_path), signal.SIGTERM)
    trainer.terminate()
    assert eventually(double.model.exits, what="the exit event")[0]["signal"] == "SIGTERM"
