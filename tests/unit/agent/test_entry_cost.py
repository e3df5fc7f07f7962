"""What the agent books on itself holds against a clock outside of it."""

from __future__ import annotations

import time

import pytest
from torch import nn

from gradiometer.capture import entry_cost, forward
from gradiometer.guard import Guard

NUM_LEAVES = 200


class Leaf(nn.Module):
    def forward(self):
        return None


class Trunk(nn.Module):
    """As many hooks as a deep model has, and no other work, so that they are all that one measures."""

    def __init__(self):
        super().__init__()
        self.leaves = nn.ModuleList(Leaf() for _ in range(NUM_LEAVES))

    def forward(self):
        for leaf in self.leaves:
            leaf()


def seconds_of(model):
    started_s = time.perf_counter()
    model()
    return time.perf_counter() - started_s


def test_hooks_are_booked_with_the_way_into_them_and_back():
    guard, hooked, bare = Guard(), Trunk(), Trunk()
    guard.entry_s = entry_cost.seconds()
    probe = forward.ForwardProbe(hooked, guard)
    with_s, without_s, booked_s = [], [], []
    for _ in range(60):
        without_s.append(seconds_of(bare))
        before_s = guard.spent_s
        with_s.append(seconds_of(hooked))
        booked_s.append(guard.spent_s - before_s)
    probe.close()
    cost_s = min(with_s) - min(without_s)
    assert 0.7 < min(booked_s) / cost_s < 1.4


def test_the_way_is_measured_once_and_is_microseconds():
    first = entry_cost.seconds()
    assert 1e-7 < first < 1e-4
    assert entry_cost.seconds() is first


def test_the_way_is_booked_once_where_one_call_is_in_another(monkeypatch):
    monkeypatch.setattr("gradiometer.guard.time.perf_counter", lambda: 5.0)
    guard = Guard()
    guard.entry_s = 0.25
    guard.entered("outer", lambda: guard.entered_tolerantly("inner", lambda: None))
    assert guard.spent_s == pytest.approx(0.25)
    guard.entered_tolerantly("log", lambda: None)
    assert guard.spent_s == pytest.approx(0.5)
