"""What integrations need of `watch`: to end it in an open run, and closures that compute nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from tests.integration.framework_runs import finished, norms


def loop(net, optimizer, steps, run):
    for _ in range(steps):
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log({"after": 1.0})


def test_unwatch_gives_everything_back_and_the_next_watch_counts_on(spool):
    with gm.init(mode="offline", start_step=10) as run:
        for width in (3, 5):
            net = nn.Linear(4, width)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            run.watch(net, optimizer, forward=True)
            loop(net, optimizer, 2, run)
            run.unwatch(optimizer)
            assert not optimizer._optimizer_step_pre_hooks
            assert not optimizer._optimizer_step_post_hooks
            assert not net._forward_hooks
            loop(net, optimizer, 2, run)
        assert run.step == 14
        run.unwatch(optimizer)
        assert run.failures == {}
    out = finished(run)
    assert list(norms(out)) == [11, 12, 13, 14]
    assert set(out.points["after"]) == {11, 12, 13, 14}
    assert out.declared["weight"].shape == (5, 4)


def test_after_unwatch_another_watch_becomes_the_clock_only_if_it_comes_later(spool):
    nets = [nn.Linear(4, 1) for _ in range(3)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with gm.init(mode="offline") as run:
        run.watch(nets[0], optimizers[0])
        run.watch(nets[1], optimizers[1], name="other")
        loop(nets[0], optimizers[0], 2, run)
        run.unwatch(optimizers[0])
        loop(nets[1], optimizers[1], 3, run)
        assert run.step == 2
        run.watch(nets[2], optimizers[2])
        loop(nets[2], optimizers[2], 1, run)
        assert run.step == 3
    out = finished(run)
    assert out.declared.keys() == {"weight", "bias", "other.weight", "other.bias"}
    assert "the step stands still" in out.unavailable()["grad/norm"]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_closure_that_does_nothing_keeps_what_was_read_before_the_clip(spool, by_keyword):
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = {}
    with gm.init(mode="offline") as run:
        run.watch(net, optimizer)
        for step in (1, 2, 3):
            (net(torch.ones(2, 4)) * 100).square().mean().backward()
            expected[step] = nn.utils.clip_grad_norm_(net.parameters(), 0.5).item()
            optimizer.step(**{"closure": lambda: None}) if by_keyword else optimizer.step(lambda: None)
            optimizer.zero_grad()
    out = finished(run)
    assert min(expected.values()) > 1
    assert norms(out) == pytest.approx(expected, rel=1e-6)
    assert out.points["grad/clip_norm"] == pytest.approx(expected, rel=1e-6)
