"""A run that goes on after its process ended: one run, several attempts, one line; with a real server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradiometer as gm
from tests.support.eventually import eventually
from tests.support.server import Server

Points = list[tuple[int, float]]


@pytest.fixture
def one(server: Callable[..., Server], spool: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    found = server()
    monkeypatch.setenv("GRADIOMETER_URL", found.url)
    return found


def record(run: gm.Run, steps: range, value: Callable[[int], float], metric: str = "train/loss") -> None:
    for step in steps:
        run.log({metric: value(step)}, step=step)


def points(one: Server, run_id: str, metric: str = "train/loss", **which: Any) -> Points:
    asked = {"series": [{"run": run_id, "metric": metric, **which}], "buckets": 5000}
    [answer] = one.post("/series/query", asked)["series"]
    assert not answer.get("error"), answer
    found = answer["points"]
    assert all(count == 1 for count in found["count"])
    return list(zip(found["step"], found["mean"], strict=True))


def test_R34_steps_after_the_checkpoint_are_those_of_the_newest_attempt(one: Server) -> None:
    run = gm.init(run_id="crashed")
    record(run, range(1, 213), lambda step: 1.0)
    run.finish(1)
    with gm.init(run_id="crashed", resume="allow", start_step=200) as run:
        record(run, range(201, 301), lambda step: 2.0)
    line = eventually(lambda: points(one, "crashed"), what="the line")
    assert line == [(step, 1.0 if step <= 200 else 2.0) for step in range(1, 301)]
    assert points(one, "crashed", attempt=1) == [(step, 1.0) for step in range(1, 213)]
    assert points(one, "crashed", attempt=2) == [(step, 2.0) for step in range(201, 301)]
    shown = one.get("/runs/crashed")
    assert shown["attempts"] == 2
    assert [source["last_step"] for source in shown["sources"]] == [212, 300]
    assert shown["state"] == "finished"


def test_R34_also_where_nobody_says_at_which_step_the_checkpoint_was(one: Server) -> None:
    with gm.init(run_id="silent") as run:
        record(run, range(1, 213), lambda step: 1.0)
    with gm.init(run_id="silent") as run:
        record(run, range(201, 301), lambda step: 2.0)
    assert points(one, "silent") == [(step, 1.0 if step <= 200 else 2.0) for step in range(1, 301)]


def test_R35_a_trial_restored_far_back_is_neither_shifted_nor_overlapping(one: Server) -> None:
    with gm.init(run_id="trial") as run:
        record(run, range(1, 155), lambda step: step / 1000)
    with gm.init(run_id="trial", resume="must", start_step=100) as run:
        for _ in range(50):
            # Without steps of the caller's own: counted on from the checkpoint.
            run.log({"train/loss": 7.0})
    # Counted from 0 in a new run, so the value after 100 others is that of step 100.
    old, new = range(1, 100), range(100, 150)
    assert points(one, "trial") == [(step, step / 1000) for step in old] + [(step, 7.0) for step in new]
    assert points(one, "trial", attempt=1) == [(step, step / 1000) for step in range(1, 155)]


def test_R36_irregular_steps_stay_where_they_were_logged(one: Server) -> None:
    first, second = [9, 19, 29, 39, 49, 59, 69, 79], [80, 90, 100, 110, 120, 130, 140, 150]
    with gm.init(run_id="irregular") as run:
        for step in first:
            run.log({"train/loss": float(step), "val/loss": 1.0, "val/epoch": step / 10}, step=step)
    with gm.init(run_id="irregular", start_step=79) as run:
        for epoch, step in enumerate(second):
            run.log({"train/loss": float(step)}, step=step)
            # A validation that counts for itself, from 0 again.
            run.log({"val/loss": 2.0}, step=epoch)
    assert points(one, "irregular") == [(step, float(step)) for step in first + second]
    assert points(one, "irregular", "val/loss", attempt=2) == [(epoch, 2.0) for epoch in range(8)]
    assert points(one, "irregular", "val/loss", attempt=1) == [(step, 1.0) for step in first]


TRAINING = """
import os, signal, sys
import gradiometer as gm
first, last, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
run = gm.init(project="preempted", resume=os.environ.get("MODE"), start_step=first - 1)
for step in range(first, last + 1):
    run.log({"train/loss": float(last)}, step=step)
print(run.id, flush=True)
if end == "kill":
    run._feeder.flush(10)
    os.kill(os.getpid(), signal.SIGKILL)
exec(end)
"""


def train(first: int, last: int, end: str, folder: Path, **settings: str) -> str:
    command = [sys.executable, "-c", TRAINING, str(first), str(last), end]
    done = subprocess.run(
        command,
        env={**os.environ, **settings},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.stdout.strip()


def test_R37_a_preempted_run_goes_on_under_its_id(one: Server, tmp_path: Path) -> None:
    assert train(1, 20, "kill", tmp_path, GRADIOMETER_RUN_ID="job-17") == "job-17"
    assert train(11, 30, "run.finish()", tmp_path, GRADIOMETER_RUN_ID="job-17") == "job-17"
    runs = one.get("/runs")["runs"]
    assert [run["id"] for run in runs] == ["job-17"]
    assert eventually(lambda: one.get("/runs/job-17")["attempts"] == 2)
    assert points(one, "job-17") == [(step, 20.0 if step <= 10 else 30.0) for step in range(1, 31)]


@pytest.mark.parametrize(
    "end", ["kill", "sys.exit(3)", "raise ValueError('late')", "run.finish(1)", "os._exit(0)"]
)
def test_R37_auto_goes_on_with_a_run_that_ended_badly(end: str, spool: Path, tmp_path: Path) -> None:
    settings = {"GRADIOMETER_RESUME": "auto", "GRADIOMETER_MODE": "offline"}
    if end != "kill":
        settings = {"MODE": "auto", "GRADIOMETER_MODE": "offline"}
    else:
        # By the variable alone.
        settings["MODE"] = ""
    first = train(1, 20, end, tmp_path, **settings)
    assert train(11, 30, "run.finish()", tmp_path, **settings) == first
    attempts = sorted(int(path.name) for path in (spool / first).iterdir())
    assert len(attempts) == 2
    # That one ended well, and the next begins another run.
    assert train(1, 5, "pass", tmp_path, **settings) != first
    assert not list((spool / ".resume").iterdir())


def test_R37_auto_leaves_other_commands_and_living_runs_alone(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"MODE": "auto", "GRADIOMETER_MODE": "offline"}
    first = train(1, 20, "kill", tmp_path, **settings)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert train(1, 5, "pass", elsewhere, **settings) != first
    command = [sys.executable, "-c", TRAINING, "1", "5", "sys.stdin.read()"]
    running = subprocess.Popen(
        command,
        env={**os.environ, **settings},
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline().strip() == first, "it goes on with the one that was killed"
    assert train(1, 5, "pass", tmp_path, **settings) != first, (
        "while that one runs, another one is another run"
    )
    running.communicate("")
    assert running.returncode == 0


def test_must_and_never_ask_the_server(one: Server, spool: Path) -> None:
    with pytest.raises(ValueError, match=r"resume='must', but there is no run 'asked' at http"):
        gm.init("p", run_id="asked", resume="must")
    with gm.init("p", run_id="asked", resume="never") as run:
        run.log({"x": 1.0})
    eventually(lambda: not list(spool.glob("asked/*")), what="only the server knows it")
    with pytest.raises(ValueError, match=r"resume='never', but run 'asked' exists already: choose another"):
        gm.init("p", run_id="asked", resume="never")
    with pytest.raises(ValueError, match=r"run 'asked' belongs to project 'p', not to 'q': pass project='p'"):
        gm.init("q", run_id="asked", resume="must")
    with gm.init("p", run_id="asked", resume="must") as run:
        assert run.id == "asked"
    with gm.init("p", resume="never") as run:
        assert run.id not in ("", "asked")


def test_must_and_never_know_the_spool(spool: Path) -> None:
    with gm.init(run_id="here", mode="offline"):
        pass
    with pytest.raises(ValueError, match="exists already"):
        gm.init(run_id="here", mode="offline", resume="never")
    with gm.init(run_id="here", mode="offline", resume="must") as run:
        assert run.id == "here"


@pytest.mark.parametrize("resume", ["must", "never"])
def test_what_cannot_be_checked_does_not_stop_the_training(
    resume: str, spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that takes the connection and says nothing, which is worse than one that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started_s = time.monotonic()
        run = gm.init(url=url, run_id="unknown", resume=resume)
        assert time.monotonic() - started_s < 8.0
        assert run.id == "unknown"
        assert f"resume='{resume}' could not be checked" in caplog.text
        run.finish(deadline_s=0.1)


def test_a_clock_that_was_set_back_does_not_put_an_attempt_before_its_predecessor(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gm.init(run_id="clock", mode="offline"):
        pass
    real = time.time_ns
    with monkeypatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: real() - 86_400_000_000_000)
        with gm.init(run_id="clock", mode="offline") as run:
            assert run.directory is not None
            second = int(run.directory.parent.name)
    attempts = sorted(int(path.name) for path in (spool / "clock").iterdir())
    assert attempts == [second - 1, second]


def test_auto_works_in_a_working_directory_that_is_gone(spool: Path, tmp_path: Path) -> None:
    script = "import os, gradiometer as gm; os.rmdir(os.getcwd()); gm.init(mode='offline', resume='auto').finish(); print('trained')"
    folder = tmp_path / "gone"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "trained\n", done.stderr


def test_the_ranks_of_a_launch_go_on_together(spool: Path, tmp_path: Path) -> None:
    """Two ranks without a process group, restarted by their launcher: one run, whatever the order in which they start."""
    launcher = f"""
import os, subprocess, sys
for restart in (0, 1):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", {TRAINING!r}, "1", "5", "kill"],
            env={{**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 "TORCHELASTIC_RESTART_COUNT": str(restart)}},
        )
        for rank in (1, 0)
    ]
    for rank in ranks:
        rank.wait()
"""
    settings = {**os.environ, "MODE": "auto", "GRADIOMETER_MODE": "offline"}
    done = [
        subprocess.run(
            [sys.executable, "-c", launcher],
            env=settings,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=90,
        )
        for _ in range(2)
    ]
    ids = {line for one in done for line in one.stdout.split()}
    assert len(ids) == 1, [one.stderr for one in done]
    [run_id] = ids
    attempts = list((spool / run_id).iterdir())
    assert len(attempts) == 4
    assert all(len(list(attempt.glob("rank-*"))) == 2 for attempt in attempts)
