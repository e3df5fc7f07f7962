"""How a process ended, found out by one that is not its parent: every source of the answer on real processes."""

from __future__ import annotations

import os
import platform
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gradiometer import last_words, process
from gradiometer.last_words import LastWords
from gradiometer.uplink import death
from gradiometer.uplink.death import TrainerWatch

KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
TELLS_AFTER_REAPING = KERNEL >= (6, 15)
"""Whether the kernel has PIDFD_INFO_EXIT; an older one leaves only elimination once the parent has reaped."""


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=-1
    )


def started(trainer: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    assert trainer.stdout is not None
    trainer.stdout.readline()
    trainer.stdout.close()
    return trainer


def watch(trainer: subprocess.Popen[bytes], directory: Path = Path("/nonexistent")) -> TrainerWatch:
    return TrainerWatch(pid=trainer.pid, start=process.start_mark(trainer.pid), directory=directory)


def wait_dead(pidfd: int | None) -> None:
    assert pidfd is not None
    assert select.select([pidfd], [], [], 10.0)[0]


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGUSR1])
def test_a_signal_is_told_by_the_kernel(number: signal.Signals, reaped: bool) -> None:
    trainer = started(sleeper())
    watched = watch(trainer)
    assert watched.alive()
    trainer.send_signal(number)
    wait_dead(watched.pidfd)
    if reaped:
        trainer.wait()
    assert not watched.alive()
    ending = watched.ending()
    if TELLS_AFTER_REAPING or not reaped:
        assert (ending.code, ending.signal, ending.inferred) == (None, number.name, False)
    else:
        assert (ending.code, ending.signal, ending.inferred) == (None, "SIGKILL", True)
    trainer.wait()
    watched.close()


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_an_exit_code_is_told_by_the_kernel(code: int, reaped: bool) -> None:
    program = f"import os, sys; sys.stdin.read(); os._exit({code})"
    trainer = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    watched = watch(trainer)
    assert trainer.stdin is not None
    trainer.stdin.close()
    wait_dead(watched.pidfd)
    if reaped:
        trainer.wait()
    ending = watched.ending()
    if TELLS_AFTER_REAPING or not reaped:
        assert (ending.code, ending.signal, ending.inferred) == (code, None, False)
        assert ending.reason == f"exit code {code}"
    else:
        assert ending.inferred
    trainer.wait()
    watched.close()


def dead_pid() -> tuple[int, str]:
    trainer = started(sleeper())
    mark = process.start_mark(trainer.pid)
    assert mark is not None
    trainer.kill()
    trainer.wait()
    return trainer.pid, mark


def test_a_process_that_died_before_the_watch_leaves_sigkill_to_infer(tmp_path: Path) -> None:
    pid, mark = dead_pid()
    watched = TrainerWatch(pid=pid, start=mark, directory=tmp_path)
    assert watched.pidfd is None
    assert not watched.alive()
    ending = watched.ending()
    assert (ending.code, ending.signal, ending.inferred) == (None, "SIGKILL", True)


@pytest.mark.parametrize(("code", "guessed"), [(3, True), (1, False), (None, True)])
def test_last_words_are_better_than_elimination(code: int | None, guessed: bool, tmp_path: Path) -> None:
    pid, mark = dead_pid()
    last_words.write(tmp_path, LastWords(code=code, guessed=guessed))
    ending = TrainerWatch(pid=pid, start=mark, directory=tmp_path).ending()
    assert (ending.code, ending.signal, ending.inferred) == (code, None, guessed)
    assert "expected" in ending.reason


def test_the_kernel_knows_better_than_last_words(tmp_path: Path) -> None:
    last_words.write(tmp_path, LastWords(code=0, guessed=True))
    trainer = started(sleeper())
    watched = watch(trainer, tmp_path)
    trainer.kill()
    wait_dead(watched.pidfd)
    ending = watched.ending()
    assert (ending.code, ending.signal, ending.inferred) == (None, "SIGKILL", False)
    trainer.wait()
    watched.close()


def test_damaged_last_words_say_nothing(tmp_path: Path) -> None:
    assert last_words.read(tmp_path) is None
    (tmp_path / "last_words.json").write_bytes(b'{"code": "x"}')
    assert last_words.read(tmp_path) is None


FAULTS = [
    ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ("import os; os.abort()", "SIGABRT"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "SIGBUS"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGFPE)", "SIGFPE"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS)
def test_what_faulthandler_wrote_is_better_than_elimination(fault: str, name: str, tmp_path: Path) -> None:
    log = tmp_path / "fault.log"
    program = f"import faulthandler; faulthandler.enable(open({str(log)!r}, 'w')); {fault}"
    trainer = subprocess.Popen([sys.executable, "-c", program])
    pid = trainer.pid
    trainer.wait()
    ending = TrainerWatch(pid=pid, start="an earlier process", directory=tmp_path).ending()
    assert (ending.signal, ending.inferred) == (name, True)


def test_a_pid_that_changed_hands_is_not_the_trainer(tmp_path: Path) -> None:
    # This process stands for the one that got the dead trainer's pid.
    watched = TrainerWatch(pid=os.getpid(), start="boot:1", directory=tmp_path)
    assert not watched.alive()
    assert watched.pidfd is None
    assert watched.ending().inferred


def test_start_marks_tell_processes_apart() -> None:
    trainers = [started(sleeper()) for _ in range(2)]
    assert process.start_mark(os.getpid()) == process.start_mark(os.getpid())
    assert len({process.start_mark(trainer.pid) for trainer in trainers}) in (1, 2)
    mark = process.start_mark(trainers[0].pid)
    assert process.is_running(trainers[0].pid, mark)
    assert not process.is_running(trainers[0].pid, "other")
    assert not process.is_running(trainers[0].pid, None)
    for trainer in trainers:
        trainer.kill()
        wait_zombie(trainer.pid)
        assert not process.is_running(trainer.pid, process.start_mark(trainer.pid))
        assert process.zombie_status(trainer.pid) == signal.SIGKILL
        trainer.wait()
        assert process.start_mark(trainer.pid) is None
        assert process.zombie_status(trainer.pid) is None


def wait_zombie(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    wait_dead(pidfd)
    os.close(pidfd)


@pytest.mark.parametrize(("before", "after", "blamed"), [(0, 1, True), (3, 3, False), (2, 5, True)])
def test_the_oom_killer_is_named_when_its_counter_rose(
    before: int, after: int, blamed: bool, tmp_path: Path
) -> None:
    events = tmp_path / "memory.events"
    events.write_text(f"low 0\nmax 17\noom 9\noom_kill {before}\noom_group_kill 0\n")
    trainer = started(sleeper())
    watched = TrainerWatch(
        pid=trainer.pid,
        start=process.start_mark(trainer.pid),
        directory=tmp_path,
        oom_file=events,
    )
    trainer.kill()
    wait_dead(watched.pidfd)
    events.write_text(f"low 0\nmax 18\noom 10\noom_kill {after}\noom_group_kill 0\n")
    ending = watched.ending()
    assert ending.signal == "SIGKILL"
    assert ("OOM killer" in ending.reason) == blamed
    trainer.wait()
    watched.close()


def test_this_machine_says_where_it_counts_oom_kills() -> None:
    path = death.find_oom_file(os.getpid())
    if path is not None:
        assert path.name in ("memory.events", "memory.oom_control")
        assert "oom_kill" in path.read_text()
