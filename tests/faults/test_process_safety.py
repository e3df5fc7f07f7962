"""Forks, signals, the interpreter's end, notebooks and clocks: whatever a process does, the training comes first."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gradiometer as gm
from tests.faults.ingest_double import IngestDouble
from tests.support.eventually import eventually
from tests.support.recorded import recorded
from tests.support.server import Server


@pytest.fixture
def double() -> Iterator[IngestDouble]:
    double = IngestDouble().start()
    yield double
    double.stop()


def run_script(body: str, timeout_s: float = 60.0, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


FORKING = """
import os, threading
import torch
from torch.utils.data import DataLoader, Dataset
import gradiometer as gm

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        # What a careless dataset does in a worker; it belongs to nobody there.
        run.log({"worker": 1.0})
        run.alert("from a worker")
        run.dropped
        return torch.ones(4)

run = gm.init(run_id="forks")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.watch(model, optimizer)
stop = threading.Event()
def noise():
    # Keeps the agent's thread and its locks busy at the moment of each fork.
    while not stop.is_set():
        run.log({"noise": float("nan"), "bad": "text"}, step=run.step)
        stop.wait(0.0005)
thread = threading.Thread(target=noise)
thread.start()
for _ in range(20):
    for batch in DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        run.log({"train/loss": 0.5})
stop.set()
thread.join()
run.finish()
print("trained")
"""


def test_twenty_loaders_with_forked_workers_do_not_hang(
    double: IngestDouble, spool: Path, tmp_path: Path
) -> None:
    started_s = time.monotonic()
    done = run_script(FORKING, 120.0, GRADIOMETER_URL=double.url)
    assert done.stdout == "trained\n", done.stderr
    print(f"20 loaders in {time.monotonic() - started_s:.1f} s")
    out = delivered(double, tmp_path)
    assert sorted(out.points["train/loss"]) == list(range(1, 41))
    assert "worker" not in out.points
    assert out.of_kind("alert") == []
    assert [event.attributes["code"] for event in out.of_kind("exit")] == [0]


def delivered(double: IngestDouble, folder: Path):  # type: ignore[no-untyped-def]
    """What the double has stored, read as a spool."""
    from gradiometer.spool import SpoolWriter

    rank = folder / "delivered"
    rank.mkdir()
    writer = SpoolWriter(rank)
    writer.append_batch(double.model.records())
    writer.close()
    return recorded(rank)


def test_a_forked_child_may_have_a_run_of_its_own(spool: Path) -> None:
    done = run_script(
        """
        import os, sys
        import gradiometer as gm
        parent = gm.init(run_id="parent", mode="offline")
        parent.log({"x": 1.0})
        child = os.fork()
        if child == 0:
            with gm.init(run_id="child", mode="offline") as run:
                run.log({"y": 2.0})
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        parent.log({"x": 3.0})
        """
    )
    assert done.returncode == 0, done.stderr
    [parent], [child] = spool.glob("parent/*/rank-00000"), spool.glob("child/*/rank-00000")
    assert recorded(parent).points == {"x": {0: 1.0, 1: 3.0}}
    assert recorded(child).points == {"y": {0: 2.0}}
    assert [event.attributes["code"] for event in recorded(parent).of_kind("exit")] == [0]


STEADY = """
import os, threading
import gradiometer as gm
run = gm.init(run_id="steady")
for step in range(1, 1_000_000):
    run.log({"train/loss": 1.0 / step}, step=step)
    print(step, flush=True)
    threading.Event().wait(0.001)
"""


@pytest.mark.parametrize("away", [False, True], ids=["server up", "server away"])
def test_R60_R61_sigterm_loses_nothing_and_ends_as_it_would_have(
    away: bool, server: Callable[..., Server], spool: Path
) -> None:
    one = server()
    settings = {**os.environ, "GRADIOMETER_URL": one.url, "GRADIOMETER_LINGER_S": "60"}
    if away:
        one.kill()
    trainer = subprocess.Popen(
        [sys.executable, "-c", STEADY],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    while int(trainer.stdout.readline()) < 40:
        pass
    trainer.terminate()
    ended_s = time.monotonic()
    rest, errors = trainer.communicate(timeout=30)
    took_s = time.monotonic() - ended_s
    assert trainer.returncode == -signal.SIGTERM, errors
    assert took_s < 5.0, "the grace of a batch system is short"
    last = max([40, *map(int, rest.split())])
    if away:
        one.restart()
    shown = eventually(lambda: (run := one.get("/runs/steady"))["state"] == "crashed" and run, 30.0)
    assert (shown["exit"]["signal"], shown["exit"]["inferred"]) == ("SIGTERM", False)
    asked = {"series": [{"run": "steady", "metric": "train/loss"}], "buckets": 5000}
    steps = one.post("/series/query", asked)["series"][0]["points"]["step"]
    # One more may have been logged and not printed.
    assert steps in (list(range(1, last + 1)), list(range(1, last + 2)))


def test_R59_what_a_server_missed_at_the_end_arrives_when_it_is_back(
    server: Callable[..., Server],
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = server()
    monkeypatch.setenv("GRADIOMETER_URL", one.url)
    monkeypatch.setenv("GRADIOMETER_LINGER_S", "60")
    run = gm.init(run_id="late")
    for step in range(1, 101):
        if step == 71:
            eventually(lambda: one.get("/runs/late")["last_step"] == 70)
            one.kill()
        run.log({"train/loss": 1.0}, step=step)
    run.finish(deadline_s=0.5)
    assert "are still in the spool" in caplog.text
    one.restart()
    eventually(lambda: one.get("/runs/late")["state"] == "finished", 30.0)
    asked = {"series": [{"run": "late", "metric": "train/loss"}], "buckets": 5000}
    points = one.post("/series/query", asked)["series"][0]["points"]
    assert (points["step"], set(points["count"])) == (list(range(1, 101)), {1})
    eventually(lambda: not list(spool.rglob("*.seg")))


@pytest.mark.parametrize("attempt", range(3))
def test_threads_that_log_while_the_interpreter_ends(attempt: int, spool: Path) -> None:
    done = run_script(
        """
        import atexit, threading
        import gradiometer as gm
        atexit.register(lambda: run.log({"after": 1.0}))
        run = gm.init(run_id="threads", mode="offline")
        atexit.register(lambda: run.log({"before": 1.0}))
        class Late:
            def __del__(self):
                run.log({"late": 1.0})
                run.finish()
        late = Late()
        begun = threading.Event()
        def log(name):
            while True:
                run.log({name: 1.0})
                begun.set()
        for name in "abc":
            threading.Thread(target=log, args=(name,), daemon=True).start()
        begun.wait()
        """
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr, done.stderr
    assert "Fatal" not in done.stderr, done.stderr
    [rank] = spool.glob("threads/*/rank-00000")
    assert [event.attributes["code"] for event in recorded(rank).of_kind("exit")] == [0]


def test_a_cell_that_is_run_again_begins_another_run(spool: Path) -> None:
    """As in a notebook: `init` again and again in one process, with the last model still watched."""
    torch = pytest.importorskip("torch")
    threads, descriptors = set(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: len(getattr(model, name)) for name in ("_forward_hooks", "_forward_pre_hooks")}
    hooks = sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM)
    for cell in range(10):
        run = gm.init(run_id=f"cell-{cell}", mode="offline")
        run.watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            run.log({"train/loss": 1.0})
    run.finish()
    for cell in range(10):
        [rank] = spool.glob(f"cell-{cell}/*/rank-00000")
        out = recorded(rank)
        assert list(out.layers["weight"]) == [1, 2, 3]
        assert [event.attributes["code"] for event in out.of_kind("exit")] == [0]
    eventually(lambda: set(threading.enumerate()) == threads, what="every thread has ended")
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 1
    assert {name: len(getattr(model, name)) for name in before} == before
    assert (sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM)) == hooks


def test_a_script_that_is_run_twice_in_one_interpreter(spool: Path, tmp_path: Path) -> None:
    """As `%run train.py` does: the interpreter stays, whatever the script ends with."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, gradiometer as gm\n"
        "run = gm.init(mode='offline')\n"
        "run.log({'x': 1.0})\n"
        "if __name__ == 'late': raise ValueError('bad batch')\n"
        "sys.exit(3)\n"
    )
    for name, error in (("__main__", SystemExit), ("late", ValueError)):
        with pytest.raises(error):
            runpy.run_path(str(script), run_name=name)
    gm.init(mode="offline").finish()
    ranks = sorted(spool.glob("*/*/rank-00000"))
    assert len(ranks) == 3
    assert all(len(recorded(rank).of_kind("exit")) == 1 for rank in ranks)


def test_init_outside_of_the_main_thread(spool: Path) -> None:
    found: list[object] = []

    def train() -> None:
        with gm.init(run_id="threaded", mode="offline") as run:
            run.log({"x": 1.0})
        found.append(run.dropped)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(30)
    assert found == [{}]


def test_clocks_that_jump_change_neither_order_nor_end(
    server: Callable[..., Server], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = server()
    monkeypatch.setenv("GRADIOMETER_URL", one.url)
    real, day_s, jump_s = time.time, 86_400.0, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    run = gm.init(run_id="jumps")
    for step in range(1, 401):
        # Forward by a day, back by two, and to before 1970.
        jump_s = {0: 0.0, 1: day_s, 2: -day_s}.get(step // 100, -real() - 1000.0)
        run.log({"train/loss": float(step)}, step=step)
    run.finish()
    shown = eventually(lambda: (found := one.get("/runs/jumps"))["state"] == "finished" and found)
    asked = {"series": [{"run": "jumps", "metric": "train/loss"}], "buckets": 5000}
    points = one.post("/series/query", asked)["series"][0]["points"]
    assert points["step"] == list(range(1, 401))
    assert points["mean"] == [float(step) for step in range(1, 401)]
    assert shown["rejected_records"] == 0


@pytest.mark.parametrize("home", ["/proc/nothing", "file"])
def test_a_home_that_cannot_be_written(home: str, tmp_path: Path) -> None:
    if home == "file":
        (tmp_path / "file").write_text("not a folder")
        home = str(tmp_path / "file")
    settings = {
        name: value for name, value in os.environ.items() if not name.startswith(("GRADIOMETER_", "XDG_"))
    }
    script = """
    import logging
    logging.basicConfig()
    import gradiometer as gm
    for resume in (None, "auto"):
        with gm.init(resume=resume) as run:
            run.log({"x": 1.0})
            assert run.id == ""
    print("trained")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**settings, "HOME": home},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "trained\n", done.stderr
    assert done.stderr.count("WARNING") == 2
    assert "set GRADIOMETER_SPOOL to another folder" in done.stderr


def test_a_process_that_ends_at_once_is_told_by_its_uplink(double: IngestDouble, spool: Path) -> None:
    done = run_script(
        """
        import os
        import gradiometer as gm
        run = gm.init()
        for step in range(100):
            run.log({"x": 1.0}, step=step)
        run._feeder.flush(10)
        os._exit(7)
        """,
        GRADIOMETER_URL=double.url,
    )
    assert done.returncode == 7
    [exit] = eventually(double.model.exits, what="the exit event")
    assert (exit["code"], exit["inferred"]) == (7, False)
