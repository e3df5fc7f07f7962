"""A value logged without a step lands on the step it belongs to, wherever in the loop the line stands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from tests.support.recorded import recorded

STEPS = 4
PLACES = ["after_forward", "after_backward", "after_step", "after_zero_grad"]
# Without the probe a forward pass alone leaves no trace; docs/architecture.md says so.
CASES = [
    (place, forward) for place in PLACES for forward in (True, False) if forward or place != "after_forward"
]


def train(run, place, *, set_to_none, forward, zero_first, micro_batches=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.watch(model, optimizer, forward=forward)
    run.log({"before/training": 1.0})
    for step in range(1, STEPS + 1):
        if zero_first:
            optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(micro_batches):
            loss = model(torch.randn(16, 4)).square().mean()
            if place == "after_forward":
                run.log({"train/loss": float(step)})
            loss.backward()
        if place == "after_backward":
            run.log({"train/loss": float(step)})
        optimizer.step()
        if place == "after_step":
            run.log({"train/loss": float(step)})
        if not zero_first:
            optimizer.zero_grad(set_to_none=set_to_none)
        if place == "after_zero_grad":
            run.log({"train/loss": float(step)})
        with torch.no_grad():
            model(torch.randn(2, 4))
        run.log({"val/loss": float(step)})


@pytest.mark.parametrize("zero_first", [False, True], ids=["zero_last", "zero_first"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize(("place", "forward"), CASES)
def test_the_place_of_the_line_does_not_move_the_point(spool, place, forward, set_to_none, zero_first):
    with gm.init(mode="offline") as run:
        train(run, place, set_to_none=set_to_none, forward=forward, zero_first=zero_first)
        directory = run.directory
    assert run.failures == {}
    out = recorded(directory)
    expected = {step: float(step) for step in range(1, STEPS + 1)}
    assert out.points["train/loss"] == expected
    assert out.points["val/loss"] == expected
    assert out.points["before/training"] == {0: 1.0}


def test_losses_of_micro_batches_belong_to_the_step_they_add_up_to(spool):
    with gm.init(mode="offline") as run:
        train(run, "after_forward", set_to_none=True, forward=True, zero_first=False, micro_batches=3)
        directory = run.directory
    assert set(recorded(directory).points["train/loss"]) == set(range(1, STEPS + 1))
