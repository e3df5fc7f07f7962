"""Phases of a step by a clock that the test turns: on the host, and by events of a device."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from gradiometer import phases
from gradiometer.capture import device_time
from gradiometer.capture.timing import HostPhases
from gradiometer.guard import Guard
from gradiometer.phases import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER

CPU = torch.device("cpu")


def test_the_innermost_phase_counts_and_the_agents_own_time_does_not():
    guard = Guard()
    host = HostPhases(guard)
    host.mark(10.0)
    host.stack.append(OPTIMIZER)
    guard.spent_s += 1.0
    host.mark(13.0)
    host.stack.append(FORWARD)
    host.mark(17.0)
    host.stack.pop()
    host.mark(18.0)
    host.stack.clear()
    host.mark(30.0)
    assert host.totals == [0.0, 4.0, 0.0, 3.0]


def test_time_of_the_call_under_way_is_the_agents_too(monkeypatch):
    now = itertools.count(0.0)
    monkeypatch.setattr("gradiometer.guard.time.perf_counter", lambda: next(now))
    guard = Guard()
    assert guard.agent_s(5.0) == 0.0
    inside = []
    guard.entered("part", lambda: inside.append(guard.agent_s(0.75)))
    assert inside == [0.75]
    assert guard.agent_s(100.0) == guard.spent_s == 1.0


class Event:
    """An event that happened at a known time, in seconds."""

    def __init__(self, at_s):
        self.at_s, self.num_waits = at_s, 0

    def elapsed_time(self, other):
        return 1000.0 * (other.at_s - self.at_s)

    def synchronize(self):
        self.num_waits += 1


def test_phases_of_a_device_add_up_to_its_step():
    now = iter([0.0, 1.0, 3.0, 7.0, 7.5, 9.0, 9.25, 10.0, 12.0])
    made = []

    def record(_device):
        made.append(Event(next(now)))
        return made[-1]

    device = device_time.DevicePhases(CPU, record)
    device.step(None)  # 0.0: the step before ends
    assert device.end_step() is None, "where the first step began is not known"
    for phase in (DATA_WAIT, FORWARD, None, BACKWARD, None, OPTIMIZER):
        device.mark(phase)
    device.step(None)  # 10.0
    device.mark(DATA_WAIT)  # 12.0: of the next step, though the end of this one is seen only now
    marks = device.end_step()
    assert not any(event.num_waits for event in made)
    values = device_time.PhasesReadback(marks, (DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER)).values()
    assert values.tolist() == pytest.approx([2.0, 4.0, 1.5, 0.75, 1.75, 10.0])
    assert values[:5].sum() == pytest.approx(values[5])
    assert [event.num_waits for event in made] == [1] * 8 + [0]
    assert [event.at_s for _, event in device._marks] == [10.0, 12.0]


def test_a_phase_that_was_never_seen_is_in_the_rest():
    marks = [(None, Event(0.0)), (BACKWARD, Event(1.0)), (None, Event(4.0)), (None, Event(6.0))]
    report = device_time.report(3, 1.5, marks, [BACKWARD])
    assert [column.name for column in report.scalars.columns] == [
        "time/backward_s",
        "time/other_s",
        "time/device_step_s",
    ]
    assert report.scalars.row() == [3.0, 3.0, 6.0]


def test_a_step_with_too_many_phases_is_not_timed_and_the_next_one_is():
    now = itertools.count()
    device = device_time.DevicePhases(CPU, lambda _device: Event(float(next(now))))
    device.step(None)
    assert device.end_step() is None
    for _ in range(device_time.MAX_MARKS + 10):
        device.mark(FORWARD)
    device.step(None)
    assert len(device._marks) <= device_time.MAX_MARKS
    assert device.end_step() is None
    ended_s = device._marks[0][1].at_s
    device.mark(FORWARD)
    device.step(None)
    marks = device.end_step()
    assert np.allclose(device_time.PhasesReadback(marks, [FORWARD]).values(), [1.0, 1.0, 2.0])
    assert marks[0][1].at_s == ended_s


class Listener:
    def __init__(self):
        self.seen = []

    def begin(self, phase):
        self.seen.append(("begin", phase))

    def end(self, phase):
        self.seen.append(("end", phase))


WAIT = [("begin", DATA_WAIT), ("end", DATA_WAIT)]


@pytest.fixture
def listener():
    listener = Listener()
    phases.subscribe(listener)
    yield listener
    phases.unsubscribe(listener)


def test_a_wrapped_loader_is_the_loader_and_its_waits_are_seen(listener):
    items = [1, 2, 3]
    loader = phases.TimedData(items)
    assert (len(loader), bool(loader), loader.index(3)) == (3, True, 2)
    assert list(loader) == items == list(loader), "as often as the original"
    # Of each walk: its beginning, three items, its end.
    assert listener.seen == WAIT * 10
    assert list(phases.TimedData(value for value in "ab")) == ["a", "b"]
    assert not phases.TimedData([])


def test_an_error_of_the_loader_is_the_users_and_ends_the_wait(listener):
    def failing():
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(phases.TimedData(failing()))
    assert listener.seen == WAIT * 3


def test_a_forked_worker_tells_nobody(listener):
    import os

    read, write = os.pipe()
    assert threading.active_count() >= 1
    child = os.fork()
    if child == 0:
        phases.begin(FORWARD)
        os.write(write, bytes([len(listener.seen)]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"\0"
    os.close(read)
    os.close(write)
