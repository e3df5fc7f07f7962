"""How the training process ends is recorded, and nothing about its end changes because somebody looked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.recorded import recorded

PREAMBLE = """
import os, signal, sys, threading
import gradiometer as gm
run = gm.init(mode="offline", run_id="life")
run.log({"train/loss": 1.0})
"""


def start(body, *, preamble=PREAMBLE, **options):
    script = textwrap.dedent(preamble) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **options},
    )


def outcome(body, **options):
    """Run a script to its end; returns its exit code, what it printed and what its run recorded."""
    process = start(body, **options)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def read(spool):
    directories = sorted(spool.glob("life/*/rank-00000"))
    assert len(directories) == 1
    return recorded(directories[0])


def exit_of(out):
    assert out.events[-1].kind == "exit", "the exit event closes the source"
    assert len(out.of_kind("exit")) == 1
    return {name: out.events[-1].attributes[name] for name in ("code", "signal", "inferred")}


@pytest.mark.parametrize(
    ("body", "code", "recorded_code", "guessed"),
    [
        ("", 0, 0, True),
        ("run.finish()", 0, 0, False),
        ("run.finish(4); run.finish(0)", 0, 4, False),
        ("sys.exit()", 0, 0, True),
        ("sys.exit(3)", 3, 3, True),
        ("sys.exit('no data')", 1, 1, True),
        ("with run: sys.exit(5)", 5, 5, False),
        ("with run: raise SystemExit(5)", 5, 5, False),
        ("with run: pass", 0, 0, False),
    ],
)
def test_an_orderly_end(body, code, recorded_code, guessed, spool):
    returncode, _ = outcome(body)
    assert returncode == code
    out = read(spool)
    # Offline nobody sees the end from outside, and inside nobody knows the code for sure.
    assert exit_of(out) == {"code": recorded_code, "signal": None, "inferred": guessed}
    assert out.points["train/loss"] == {0: 1.0}
    assert out.of_kind("exception") == []


@pytest.mark.parametrize(
    "body", ["raise ValueError('bad batch')", "with run:\n    raise ValueError('bad batch')"]
)
def test_an_exception(body, spool):
    returncode, stderr = outcome(body)
    assert returncode == 1
    assert stderr.rstrip().endswith("ValueError: bad batch")
    assert stderr.count("Traceback") == 1
    out = read(spool)
    [event] = out.of_kind("exception")
    assert event.attributes["type"] == "ValueError"
    assert event.attributes["message"] == "bad batch"
    assert 'File "<string>"' in event.attributes["traceback"]
    assert exit_of(out) == {"code": 1, "signal": None, "inferred": False}


def test_a_huge_traceback_is_cut_to_its_end(spool):
    outcome("raise ValueError('x' * 100_000 + 'END')")
    [event] = read(spool).of_kind("exception")
    assert len(event.attributes["traceback"].encode()) <= 16 * 1024
    assert event.attributes["traceback"].rstrip().endswith("END")


def test_an_exception_hook_of_the_user_still_runs(spool):
    body = """
    sys.excepthook = lambda *what: sys.stderr.write("mine\\n")
    run.finish()
    run = gm.init(mode="offline", run_id="again")
    1 / 0
    """
    returncode, stderr = outcome(body)
    assert returncode == 1
    assert "mine" in stderr


def test_interruption_from_the_keyboard(spool):
    returncode, _ = outcome("os.kill(os.getpid(), signal.SIGINT)")
    assert returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    out = read(spool)
    assert out.of_kind("exception")[0].attributes["type"] == "KeyboardInterrupt"
    assert exit_of(out)["code"] == 130


def test_sigterm_is_recorded_and_kills_as_before(spool):
    process = start("print('ready', flush=True); threading.Event().wait(60)")
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert exit_of(read(spool)) == {"code": None, "signal": "SIGTERM", "inferred": False}


def test_a_sigterm_handler_of_the_user_is_left_alone(spool):
    preamble = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *what: sys.exit(7))\n" + PREAMBLE
    process = start("print('ready', flush=True); threading.Event().wait(60)", preamble=preamble)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 7
    assert exit_of(read(spool)) == {"code": 7, "signal": None, "inferred": True}


def test_a_crash_of_the_interpreter_leaves_its_stacks(spool):
    returncode, _ = outcome("run._feeder.flush(10); os.abort()")
    assert returncode == -signal.SIGABRT
    [fault_log] = spool.glob("life/*/rank-00000/fault.log")
    assert "Fatal Python error: Aborted" in fault_log.read_text()
    assert read(spool).of_kind("exit") == [], "the uplink says how it ended, not the dead"


def test_a_faulthandler_of_the_user_is_left_alone(spool):
    preamble = "import faulthandler; faulthandler.enable()\n" + PREAMBLE
    _, stderr = outcome("os.abort()", preamble=preamble)
    assert "Fatal Python error: Aborted" in stderr


def test_an_uneventful_run_leaves_no_fault_log(spool):
    outcome("")
    assert list(spool.glob("life/*/rank-00000/fault.log")) == []


def test_a_forked_child_writes_nothing_and_ends_nothing(spool):
    body = """
    child = os.fork()
    if child == 0:
        run.log({"child": 1.0})
        run.alert("child")
        sys.exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    run.log({"train/loss": 2.0})
    """
    returncode, stderr = outcome(body)
    assert returncode == 0, stderr
    out = read(spool)
    assert out.points == {"train/loss": {0: 1.0, 1: 2.0}}
    assert [event.kind for event in out.events] == ["exit"]
    assert exit_of(out)["code"] == 0


def test_loader_workers_of_a_watched_training(spool):
    preamble = """
    import torch
    from torch.utils.data import DataLoader
    """ + PREAMBLE.replace("\n", "\n    ")
    body = """
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.watch(model, optimizer)
    loader = DataLoader(torch.ones(8, 2), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
        run.log({"train/loss": 0.0})
    """
    returncode, stderr = outcome(body, preamble=preamble)
    assert returncode == 0, stderr
    out = read(spool)
    assert list(out.layers["weight"]) == [1, 2, 3, 4]
    assert exit_of(out)["code"] == 0


def test_it_works_where_torch_is_not_installed(spool):
    preamble = """
    import sys
    class NoTorch:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")
    sys.meta_path.insert(0, NoTorch())
    """ + PREAMBLE.replace("\n", "\n    ")
    body = """
    run.log({"nested": {"value": 2}, "absent": None, "flag": True})
    run.watch(object(), object())
    assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
    """
    returncode, stderr = outcome(body, preamble=preamble)
    assert returncode == 0, stderr
    out = read(spool)
    assert out.points == {"train/loss": {0: 1.0}, "nested/value": {1: 2.0}, "flag": {1: 1.0}}
    assert "torch" in out.unavailable()["watch"]


def test_an_unwritable_spool_disables_the_run_with_one_clear_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    preamble = "import logging; logging.basicConfig()\n" + PREAMBLE
    body = "run.alert('x'); run.finish(); assert run.id == ''; print('trained')"
    process = start(body, preamble=preamble, GRADIOMETER_SPOOL=str(blocked / "spool"))
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert stdout == "trained\n"
    assert str(blocked) in stderr
    assert "set GRADIOMETER_SPOOL" in stderr
    assert stderr.count("WARNING") == 1


def test_a_second_run_in_one_process_finishes_the_first(spool):
    body = """
    second = gm.init(mode="offline", run_id="second")
    run.log({"late": 1.0})
    second.log({"x": 1.0})
    """
    returncode, stderr = outcome(body)
    assert returncode == 0, stderr
    out = read(spool)
    assert "late" not in out.points
    assert exit_of(out)["code"] == 0
    [second] = spool.glob("second/*/rank-00000")
    assert recorded(second).points == {"x": {0: 1.0}}


def test_finish_without_a_server_is_bounded_and_says_what_remains(spool):
    preamble = "import logging; logging.basicConfig()\n" + PREAMBLE.replace('mode="offline", ', "")
    body = """
    import time
    started = time.monotonic()
    run.finish(deadline_s=0.5)
    assert time.monotonic() - started < 3.0
    """
    returncode, stderr = outcome(body, preamble=preamble)
    assert returncode == 0, stderr
    assert "gradiometer: run life (http://127.0.0.1:1/runs/life)" in stderr
    assert "records are still in the spool" in stderr
    assert str(spool) in stderr


def test_a_loop_that_replays_twenty_thousand_points_without_a_pause_loses_none(spool):
    body = """
    for step in range(1, 20_001):
        run.log({"train/loss": 1.0 / step, "lr": 0.1}, step=step)
    run.finish()
    assert run.dropped == {}, run.dropped
    """
    returncode, stderr = outcome(body)
    assert returncode == 0, stderr
    points = read(spool).points
    assert list(points["lr"]) == list(range(1, 20_001))
    assert points["train/loss"][20_000] == 1.0 / 20_000


def test_a_report_reaches_the_spool_within_a_fraction_of_a_second(spool):
    body = """
    import time
    from pathlib import Path
    print(run.directory, flush=True)
    for line in sys.stdin:
        run.log({"x": 1.0})
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PREAMBLE) + textwrap.dedent(body)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    directory = Path(process.stdout.readline().strip())
    try:
        for count in range(1, 6):
            process.stdin.write("go\n")
            process.stdin.flush()
            eventually(lambda: len(recorded(directory).points.get("x", {})) == count, timeout_s=1.0)  # noqa: B023
    finally:
        process.stdin.close()
        assert process.wait(timeout=30) == 0
        process.stdout.close()
