"""Readings that nobody writes do not fill the memory, and a step that was left out says so."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import nn

from gradiometer.capture import backlog, gradients
from gradiometer.capture.backlog import Backlog


def test_what_is_held_counts_until_it_is_let_go():
    one = Backlog(100)
    holds = [one.hold(60)]
    assert not one.is_full()
    holds.append(one.hold(40))
    assert one.is_full()
    holds.pop()
    assert not one.is_full()


def test_any_thread_may_let_go_while_another_takes():
    one = Backlog(10**9)
    holds = [one.hold(1) for _ in range(20_000)]

    def let_go():
        while holds:
            holds.pop()

    thread = threading.Thread(target=let_go)
    thread.start()
    for _ in range(2_000):
        one.hold(1)
        one.is_full()
    thread.join()
    assert one._held == {}


def test_steps_are_left_out_while_the_agent_is_behind_and_read_again_afterwards(monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    told = []
    monkeypatch.setattr(backlog.Backlog.__init__, "__defaults__", (3 * 2 * 7 * 8,))
    reader = gradients.GradientReader(
        model, optimizer, "", lambda metric, reason: told.append((metric, reason))
    )
    kept = [reader.read() for _ in range(3)]
    assert told == []
    left_out = reader.read()
    assert told == [("grad/layers", backlog.BEHIND)]
    assert (left_out.blocks, sorted(left_out.unread)) == ((), [0, 1])
    assert np.isnan(left_out.table()[:, 2]).all(), "not collected, which is not the same as no gradient"
    kept.clear()
    assert len(reader.read().blocks) == 1


def test_the_parts_of_a_step_are_held_together():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    reader = gradients.GradientReader(model, optimizer, "", lambda *_: None)
    parts = [(reader.read(), None), (reader.read(), None)]
    whole, _ = gradients.combine(parts)
    parts.clear()
    assert len(reader._backlog._held) == 2
    del whole
    assert reader._backlog._held == {}
