"""The queue between training and spool: never waits, never loses silently, outlives what breaks."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest
import torch

from gradiometer import limits, wire
from gradiometer import spool as spool_module
from gradiometer.capture import readback
from gradiometer.drops import Drops
from gradiometer.feeder import INTERNAL, MAX_BYTES, QUEUE_FULL, SPOOL_FULL, TOO_MANY_NAMES, Feeder, size_of
from gradiometer.reports import EventReport, ScalarReport, Scalars
from tests.support.recorded import recorded


def point(step, value=1.0, name="x"):
    return ScalarReport(step=step, time=0.0, scalars=Scalars(columns=(wire.Column(name),), numbers=(value,)))


EXIT = EventReport(kind="exit", time=0.0, attributes={"code": 0})


class Stuck:
    """A report that keeps the agent's thread busy until it is released."""

    step = 0

    def __init__(self):
        self.started, self.released = threading.Event(), threading.Event()

    def write(self, _records):
        self.started.set()
        assert self.released.wait(30)


class Broken:
    step = 7

    def write(self, _records):
        raise RuntimeError("device lost")


@pytest.fixture
def writer(tmp_path):
    run = wire.RunInfo(run_id="r", project="p", name="n", created_s=0.0)
    return spool_module.open_source(tmp_path, run, wire.SourceInfo(rank=0, attempt=1))


def test_everything_put_is_in_the_spool_in_order_when_close_returns(writer):
    appended = []
    feeder = Feeder(writer, Drops(), lambda: appended.append(writer.seq))
    for step in range(1000):
        feeder.put(point(step, float(step)))
    feeder.put_essential(EXIT)
    assert feeder.close(10)
    out = recorded(writer.directory)
    assert out.points["x"] == {step: float(step) for step in range(1000)}
    assert out.events[-1].kind == "exit"
    assert appended[-1] == writer.seq
    assert not feeder._thread.is_alive(), "a thread that is still leaving can abort the interpreter's end"
    assert feeder.close(0), "a second close is harmless"


def test_a_full_queue_drops_at_once_and_says_so_when_there_is_room(writer):
    drops = Drops()
    stuck = Stuck()
    feeder = Feeder(writer, drops, lambda: None, max_bytes=10 * size_of(point(1)))
    feeder.put(stuck)
    assert stuck.started.wait(10)
    started_s = time.monotonic()
    for step in range(1, 31):
        feeder.put(point(step))
    assert time.monotonic() - started_s < 1.0
    assert drops.totals == {QUEUE_FULL: 20}
    stuck.released.set()
    feeder.put_essential(EXIT)
    assert feeder.close(10)
    out = recorded(writer.directory)
    assert list(out.points["x"]) == list(range(1, 11))
    [dropped] = out.of_kind("dropped")
    assert dropped.attributes == {"reports": 20, "reason": QUEUE_FULL, "first_step": 11, "last_step": 30}
    assert out.stream[-1][0] == "exit"


def test_a_hundred_thousand_points_wait_for_a_stalled_disk_in_bounded_memory(writer):
    drops, stuck = Drops(), Stuck()
    feeder = Feeder(writer, drops, lambda: None)
    feeder.put(stuck)
    assert stuck.started.wait(10)
    tracemalloc.start()
    for step in range(100_000):
        feeder.put(point(step, float(step)))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drops.totals == {}
    assert held_bytes < MAX_BYTES
    stuck.released.set()
    assert feeder.close(60)
    assert recorded(writer.directory).points["x"] == {step: float(step) for step in range(100_000)}


def test_memory_is_bounded_whatever_is_put(writer):
    stuck, drops = Stuck(), Drops()
    feeder = Feeder(writer, drops, lambda: None, max_bytes=1_000_000)
    feeder.put(stuck)
    assert stuck.started.wait(10)
    tracemalloc.start()
    for step in range(3000):
        feeder.put(point(step + 1000, step * 0.5))
        feeder.put(
            EventReport(kind="alert", time=step * 0.5, attributes={"text": chr(960 + step % 9) * 1000})
        )
        columns = tuple(wire.Column(name) for name in "abcdefghij")
        numbers = tuple(step * 0.5 + number for number in range(10))
        feeder.put(
            ScalarReport(step=step, time=0.5 * step, scalars=Scalars(columns=columns, numbers=numbers))
        )
        device = (((0,), readback.start(torch.tensor([0.5]))),)
        scalars = Scalars(columns=columns[:1], numbers=(0.0,), pending=device)
        feeder.put(ScalarReport(step=step, time=0.5 * step, scalars=scalars))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 200_000 < held_bytes < 1_500_000
    assert 1000 < drops.totals[QUEUE_FULL] < 12_000
    stuck.released.set()
    assert feeder.close(10)


def test_names_that_never_end_are_bounded_and_counted(writer, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SCHEMAS", 300)
    drops = Drops()
    feeder = Feeder(writer, drops, lambda: None)
    for step in range(1000):
        columns = (wire.Column("loss"), wire.Column(f"loss/{step}"))
        feeder.put(ScalarReport(step=step, time=0.0, scalars=Scalars(columns=columns, numbers=(1.0, 2.0))))
    assert feeder.close(10)
    out = recorded(writer.directory)
    assert out.num_schemas == 300
    assert list(out.points["loss"]) == list(range(1000)), "what has a schema is not lost beside what has none"
    assert drops.totals == {TOO_MANY_NAMES: 1000 - 299}
    assert sum(event.attributes["reports"] for event in out.of_kind("dropped")) == 1000 - 299


def test_a_report_that_breaks_costs_itself_only(writer):
    drops = Drops()
    feeder = Feeder(writer, drops, lambda: None)
    feeder.put(point(1))
    feeder.put(Broken())
    feeder.put(point(2))
    assert feeder.close(10)
    out = recorded(writer.directory)
    assert list(out.points["x"]) == [1, 2]
    assert drops.totals == {INTERNAL: 1}
    assert out.of_kind("dropped")[0].attributes["first_step"] == 7


def test_a_full_spool_drops_counts_and_goes_on_when_there_is_space(writer):
    drops = Drops()
    feeder = Feeder(writer, drops, lambda: None)
    feeder.put(point(1))
    assert feeder.flush(10)
    writer._max_bytes = 0
    for step in (2, 3):
        feeder.put(point(step, name="y"))
        assert feeder.flush(10)
    assert drops.totals == {SPOOL_FULL: 2}
    writer._max_bytes = 10**9
    feeder.put(point(4, name="y"))
    feeder.put_essential(EXIT)
    assert feeder.close(10)
    out = recorded(writer.directory)
    assert out.points == {"x": {1: 1.0}, "y": {4: 1.0}}
    assert sum(event.attributes["reports"] for event in out.of_kind("dropped")) == 2


def test_how_the_run_ended_is_written_even_into_a_full_spool(writer):
    feeder = Feeder(writer, Drops(), lambda: None)
    feeder.put(point(1))
    assert feeder.flush(10)
    writer._max_bytes = 0
    feeder.put(point(2))
    feeder.put_essential(EXIT)
    assert feeder.close(10)
    assert [entry[0] for entry in recorded(writer.directory).stream] == ["scalars", "dropped", "exit"]


def test_close_is_bounded_while_the_thread_is_stuck(writer):
    feeder = Feeder(writer, Drops(), lambda: None)
    stuck = Stuck()
    feeder.put(stuck)
    assert stuck.started.wait(10)
    started_s = time.monotonic()
    assert not feeder.close(0.05)
    assert time.monotonic() - started_s < 2.0
    stuck.released.set()
    assert feeder.close(10)


def test_a_failing_uplink_does_not_stop_the_spool(writer):
    def fails():
        raise OSError("no socket")

    drops = Drops()
    feeder = Feeder(writer, drops, fails)
    for step in (1, 2):
        feeder.put(point(step))
        assert feeder.flush(10)
    assert feeder.close(10)
    assert list(recorded(writer.directory).points["x"]) == [1, 2]
