"""Trainers that are killed at a random step, or end in any other way, on a real server: nothing in the spool is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradiometer import wire
from gradiometer.spool_reader import SpoolReader
from gradiometer.uplink.state import read_state
from tests.faults.trainer_program import ATTEMPT
from tests.support.eventually import eventually
from tests.support.server import Server

TRAINED_KILLS = 20
PLAIN_KILLS = 20
AT_ONCE = 4
TOLD_S = 10.0


def wait_for_file(directory: Path, pattern: str) -> Path:
    return eventually(lambda: next(directory.glob(pattern), None), 60.0, what=f"{pattern} in {directory}")


def stop_reading_then_kill(trainer: subprocess.Popen[bytes], attempt_directory: Path) -> None:
    """Kill a trainer while its uplink is held still, so that the spool can be read as the trainer left it."""
    uplink_pid = eventually(
        lambda: (state := read_state(attempt_directory)) and state.pid, what="the uplink's pid"
    )
    os.kill(uplink_pid, signal.SIGSTOP)
    trainer.kill()
    trainer.wait()


def go_on(attempt_directory: Path) -> None:
    state = read_state(attempt_directory)
    assert state is not None
    os.kill(state.pid, signal.SIGCONT)


def spooled_losses(rank_directory: Path) -> dict[int, float]:
    """`train/loss` by step, of every frame still in the spool."""
    reader = SpoolReader(rank_directory)
    found: dict[int, float] = {}
    columns: dict[int, list[str]] = {}
    for _, data in reader.records():
        record = wire.decode_record(data)
        if isinstance(record, wire.ScalarSchema):
            columns[record.schema_id] = [column.name for column in record.columns]
        names = columns.get(record.schema_id, []) if isinstance(record, wire.Frame) else []
        if isinstance(record, wire.Frame) and "train/loss" in names:
            values = memoryview(record.values).cast("d").tolist()
            at = names.index("train/loss")
            found.update(zip(record.steps, values[at :: len(names)], strict=True))
    reader.close()
    return found


def stored_losses(server: Server, run: str) -> dict[int, float]:
    body = {"series": [{"run": run, "metric": "train/loss"}], "buckets": 5000}
    (answer,) = server.post("/series/query", body)["series"]
    assert answer["bucket_width"] == 1
    assert set(answer["points"]["count"]) == {1}, "a step is there twice"
    return dict(zip(answer["points"]["step"], answer["points"]["mean"], strict=True))


def check_crashed(server: Server, run: str, expected: dict[int, float], killed_s: float) -> float:
    """Everything is stored and the run is told to be crashed; returns how long that took."""
    told = eventually(
        lambda: (found := server.get(f"/runs/{run}"))["state"] == "crashed" and found,
        TOLD_S,
        what=f"{run} crashed",
    )
    took_s = time.monotonic() - killed_s
    assert told["exit"]["signal"] == "SIGKILL"
    assert told["exit"]["inferred"] is False
    assert expected, "the spool held nothing, so this proves nothing"
    # All of the spool was read before the exit event, which came last.
    stored = eventually(
        lambda: len(stored := stored_losses(server, run)) >= len(expected) and stored,
        what="every step is stored",
    )
    assert stored == expected
    return took_s


def alive(trainer: subprocess.Popen[bytes], log_path: Path) -> bool:
    """True, or the reason why there is nothing to wait for."""
    if trainer.poll() is not None:
        told = log_path.with_suffix(".out").read_text()
        raise RuntimeError(f"the training ended by itself with code {trainer.returncode}:\n{told[-2000:]}")
    return True


@pytest.mark.slow
def test_R60_R61_twenty_killed_trainings_lose_no_step_of_their_spool(
    server: Callable[..., Server], spool: Path, tmp_path: Path
) -> None:
    one = server()
    choose = random.Random(9)
    took_s: list[float] = []
    for first in range(0, TRAINED_KILLS, AT_ONCE):
        trainers: dict[str, subprocess.Popen[bytes]] = {}
        for number in range(first, first + AT_ONCE):
            run = f"killed-{number}"
            environment = {**os.environ, "GRADIOMETER_URL": one.url, "GRADIOMETER_RUN_ID": run}
            log = str(tmp_path / f"{run}.jsonl")
            command = [sys.executable, "-m", "tests.faults.steady_trainer", "100000", "0.01", log]
            with (tmp_path / f"{run}.out").open("wb") as out:
                trainers[run] = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            for run, trainer in trainers.items():
                log_path = tmp_path / f"{run}.jsonl"
                num_steps = choose.randrange(5, 150)
                eventually(
                    lambda path=log_path, count=num_steps, trainer=trainer: (
                        alive(trainer, path) and path.exists() and path.read_bytes().count(b"\n") >= count
                    ),
                    90.0,
                    what=f"{run} reaches step {num_steps}",
                )
                rank_directory = wait_for_file(spool / run, "*/rank-00000")
                stop_reading_then_kill(trainer, rank_directory.parent)
                killed_s = time.monotonic()
                expected = spooled_losses(rank_directory)
                go_on(rank_directory.parent)
                took_s.append(check_crashed(one, run, expected, killed_s))
        finally:
            for trainer in trainers.values():
                trainer.kill()
                trainer.wait()
    print(f"crashed was shown after {min(took_s):.2f} to {max(took_s):.2f} s")
    eventually(lambda: not list(spool.rglob("*.seg")), 30.0, what="the spools are empty")


def start_plain(
    server: Server, spool: Path, run: str, end: str, *, steps: int = 20
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "tests.faults.trainer_program",
        str(spool),
        server.url,
        run,
        "0",
        str(steps),
        end,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def read_seq(trainer: subprocess.Popen[bytes], seq: int) -> int:
    """Read what the trainer prints up to a record; returns the last number read."""
    assert trainer.stdout is not None
    last = 0
    while last < seq:
        last = int(trainer.stdout.readline())
    return last


def test_twenty_spools_cut_off_at_a_random_record_arrive_whole(
    server: Callable[..., Server], spool: Path
) -> None:
    one = server()
    choose = random.Random(3)
    pause = threading.Event()
    for number in range(PLAIN_KILLS):
        run = f"plain-{number}"
        trainer = start_plain(one, spool, run, "wait", steps=0)
        last_seq = read_seq(trainer, choose.randrange(2, 40))
        pause.wait(choose.uniform(0.0, 0.01))
        trainer.kill()
        killed_s = time.monotonic()
        trainer.wait()
        assert trainer.stdout is not None
        # What was printed had been appended; the pipe keeps it beyond the death.
        last_step = max([last_seq, *map(int, trainer.stdout.read().split())]) - 1
        trainer.stdout.close()
        told = eventually(
            lambda run=run: (found := one.get(f"/runs/{run}"))["state"] == "crashed" and found, TOLD_S
        )
        assert told["exit"]["signal"] == "SIGKILL"
        assert told["exit"]["inferred"] is False
        assert time.monotonic() - killed_s < TOLD_S
        stored = stored_losses(one, run)
        assert list(stored) == list(range(1, len(stored) + 1))
        # One record may have been appended and not printed any more.
        assert len(stored) - last_step in (0, 1)
        assert all(value == 1.0 / step for step, value in stored.items())


ENDS: list[tuple[str, str, dict[str, Any]]] = [
    ("normal", "finished", {"code": 0, "signal": None}),
    ("nothing", "finished", {"code": 0, "signal": None}),
    ("exit", "failed", {"code": 2, "signal": None}),
    ("_exit", "failed", {"code": 3, "signal": None}),
    ("exception", "failed", {"code": 1, "signal": None}),
    ("sigterm", "crashed", {"code": None, "signal": "SIGTERM"}),
    ("segfault", "crashed", {"code": None, "signal": "SIGSEGV"}),
]


def test_R60_the_server_shows_how_each_trainer_ended(server: Callable[..., Server], spool: Path) -> None:
    one = server()
    trainers = {end: start_plain(one, spool, f"end-{end}", end) for end, _, _ in ENDS}
    try:
        for end, state, told in ENDS:
            run = eventually(
                lambda end=end, state=state: (
                    (found := one.get(f"/runs/end-{end}"))["state"] == state and found
                ),
                TOLD_S,
                what=f"{end} is shown as {state}",
            )
            assert {key: run["exit"][key] for key in told} == told
            assert run["exit"]["inferred"] is False
            assert run["exit"]["reason"]
            assert len(stored_losses(one, f"end-{end}")) == 20
    finally:
        for trainer in trainers.values():
            trainer.kill()
            trainer.wait()
            assert trainer.stdout is not None
            trainer.stdout.close()
    eventually(lambda: not list(spool.rglob(f"{ATTEMPT}")), 10.0, what="the spools are removed")
