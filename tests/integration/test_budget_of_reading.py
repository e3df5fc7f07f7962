"""A model whose gradients take more to read than the budget allows: what is read, what is told, and what is not missed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture import budget
from tests.support.recorded import recorded

pytestmark = pytest.mark.usefixtures("spool")

WARM = budget.WINDOW + 1
"""Steps after which it is decided."""


@pytest.fixture(autouse=True)
def dear(monkeypatch):
    """Whatever reading takes, it is too much."""
    monkeypatch.setattr(budget, "MIN_READING_S", 0.0)
    monkeypatch.setattr(budget, "MAX_FRACTION", 0.0)


def train(steps=50, broken=(), optimizers=1, depth=4, **options):
    """What a run recorded whose loss is NaN in `broken` steps; weights stay as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.ReLU())])
    halves = list(model.parameters())[:depth], list(model.parameters())[depth:]
    made = [torch.optim.SGD(part, lr=0.0) for part in (halves if optimizers == 2 else (model.parameters(),))]
    batch = torch.randn(8, 16)
    with gm.init(mode="offline") as run:
        run.watch(model, made if optimizers == 2 else made[0], checks=False, **options)
        for step in range(1, steps + 1):
            for parameter in model.parameters():
                parameter.grad = None
            loss = model(batch).square().mean()
            loss.backward()
            if step in broken:
                # A broken backward pass: the gradient at the output is NaN, and so all others are.
                for parameter in model.parameters():
                    parameter.grad.fill_(float("nan"))
            for optimizer in made:
                optimizer.step()
            run.log({"train/loss": loss})
        directory = run.directory
    assert run.failures == {}
    return recorded(directory)


def read_steps(out):
    (steps,) = {tuple(sorted(rows)) for rows in out.layers.values()}
    return list(steps)


def test_R65_reading_rests_where_it_would_take_too_much_and_the_agent_tells_its_own_time():
    out = train(50)
    read = read_steps(out)
    assert read[:WARM] == list(range(1, WARM + 1))
    assert read[WARM:] == [25, 33, 41, 49], "the first of every 8 steps"
    told = [event.attributes["facts"] for event in out.of_kind("environment")]
    assert (
        "none in 7 of 8 steps"
        in [facts["gradient statistics"] for facts in told if "gradient statistics" in facts][-1]
    )
    assert "watch(every=1)" in out.unavailable()["grad/norm"]
    assert len(out.points["agent/overhead_fraction"]) >= 48
    assert len(out.points["train/loss"]) == 50, "everything else is there in every step"


@pytest.mark.parametrize(
    "options", [{"every": 1}, {"every": 5}, {"statistics": "full"}, {"statistics": "norm"}]
)
def test_whoever_asks_for_every_step_gets_every_step(options):
    assert read_steps(train(40, **options)) == list(range(1, 41))


def test_a_rank_among_several_reads_every_step(monkeypatch):
    monkeypatch.setattr(budget, "is_alone", lambda: False)
    assert read_steps(train(40)) == list(range(1, 41))


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_step_that_is_not_finite_is_read_though_it_was_to_rest(optimizers):
    out = train(50, broken=(30, 31), optimizers=optimizers)
    assert {30, 31} <= set(read_steps(out))
    for rows in out.layers.values():
        assert rows[30][-1] > 0, "non-finite elements are counted"


def test_the_first_optimizer_rested_when_the_second_found_the_trouble():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    made = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model]
    with gm.init(mode="offline") as run:
        run.watch(model, made, checks=False)
        for step in range(1, 31):
            model.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            if step == 30:
                model[1].bias.grad.fill_(float("inf"))
            for optimizer in made:
                optimizer.step()
        directory = run.directory
    out = recorded(directory)
    assert out.layers["1.bias"][30][-1] == 16
    # Not 0, and not left out: it is not known.
    index = 1 if len(out.layers["0.bias"][30]) == 3 else 2
    assert out.layers["0.bias"][30][index] != out.layers["0.bias"][30][index]


def test_a_histogram_that_somebody_wants_is_taken_in_a_step_that_was_to_rest():
    out = train(40, histogram_every=30)
    assert 30 in read_steps(out)
