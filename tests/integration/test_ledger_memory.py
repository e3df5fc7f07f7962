"""The memory ledger on real loops: bytes against what one counts by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture import memory_ledger
from tests.support.recorded import recorded


def memory_of(points):
    """Metric without its group -> values by step, without what other parts report."""
    return {
        name.removeprefix("memory/"): list(values.values())
        for name, values in points.items()
        if name.startswith("memory/") and "process" not in name
    }


def train(model, optimizer, batch, *, steps=2, on_step=lambda step: None, more=()):
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for other, its_optimizer, name in more:
            run.watch(other, its_optimizer, name=name)
        for step in range(1, steps + 1):
            model(batch).float().sum().backward()
            for other, its_optimizer, _ in more:
                other(batch).sum().backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            on_step(step)
    assert run.failures == {}
    out = recorded(run.directory)
    return memory_of(out.points), out


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


# What torch deprecates in its own optimizers is not our business.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_state_inside_a_zero_redundancy_optimizer(spool, one_rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(10, 20)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    found, _ = train(model, optimizer, torch.ones(2, 10))
    assert found["optimizer_state_bytes"] == [2 * 4 * 220 + 2 * 4] * 2


def test_adamw_in_float32(spool):
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 1))
    numel = 10 * 20 + 20 + 20 + 1
    found, out = train(model, adamw(model), torch.ones(2, 10))
    assert found == {
        "parameters_bytes": [4 * numel] * 2,
        "gradients_bytes": [4 * numel] * 2,
        # Two moments, and a step counter of float32 for each of the four parameters.
        "optimizer_state_bytes": [2 * 4 * numel + 4 * 4] * 2,
    }
    assert out.unavailable()["memory/activations_bytes"] == (
        "the model is on cpu: torch counts memory on CUDA only"
    )


def test_sgd_has_no_state(spool):
    model = nn.Linear(10, 1)
    found, _ = train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 10))
    assert found["optimizer_state_bytes"] == [0, 0]


def test_bfloat16_parameters_and_types_that_differ(spool):
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.Linear(64, 1, dtype=torch.bfloat16))
    model[1].to(torch.float32)
    model[0].register_forward_hook(lambda _module, _args, output: output.float())
    low, high = 2 * (64 * 64 + 64), 4 * 65
    found, _ = train(model, adamw(model), torch.ones(2, 64, dtype=torch.bfloat16), steps=1)
    assert found == {
        "parameters_bytes": [low + high],
        "parameters_bytes/bfloat16": [low],
        "parameters_bytes/float32": [high],
        "gradients_bytes": [low + high],
        "gradients_bytes/bfloat16": [low],
        "gradients_bytes/float32": [high],
        "optimizer_state_bytes": [2 * (low + high) + 16],
        "optimizer_state_bytes/bfloat16": [2 * low],
        "optimizer_state_bytes/float32": [2 * high + 16],
    }


class Tied(nn.Module):
    """Tied weights, frozen parameters, a buffer, and a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.frozen(self.embedding(tokens))))


def test_tied_weights_count_once_and_frozen_ones_have_no_gradient(spool):
    model = Tied()
    trained = 11 * 8 + 8 + 8
    found, _ = train(model, adamw(model), torch.arange(11))
    assert found["parameters_bytes"] == [4 * (trained + 8 * 8 + 8 + 3 * 3 + 3)] * 2
    assert found["gradients_bytes"] == [4 * trained] * 2
    assert found["optimizer_state_bytes"] == [2 * 4 * trained + 3 * 4] * 2
    # Mean and variance of the batch norm, and how many batches it saw, an int64.
    assert found["buffers_bytes"] == [2 * 8 * 4 + 8] * 2
    assert found["buffers_bytes/float32"] == [64, 64]


def test_sparse_gradients_count_their_indices_and_values(spool):
    model = nn.EmbeddingBag(50, 4, sparse=True, mode="sum")
    found, _ = train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.tensor([[1, 2, 3]]))
    assert found["gradients_bytes"] == [3 * 8 + 3 * 4 * 4] * 2
    assert found["parameters_bytes"] == [50 * 4 * 4] * 2


def test_several_models_have_names_and_several_optimizers_are_one(spool):
    model, critic = nn.Linear(10, 1), nn.Linear(10, 2)
    parts = [torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), torch.optim.Adam([model.bias])]
    with gm.init(mode="offline") as run:
        run.watch(model, parts)
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        run.watch(critic, of_critic, name="critic")
        for _ in range(3):
            model(torch.ones(2, 10)).sum().backward()
            for part in parts:
                part.step()
                part.zero_grad()
            critic(torch.ones(2, 10)).sum().backward()
            of_critic.step()
            of_critic.zero_grad()
    assert run.failures == {}
    found = memory_of(recorded(run.directory).points)
    assert found["parameters_bytes"] == [44] * 3
    assert found["gradients_bytes"] == [44] * 3
    assert found["optimizer_state_bytes"] == [40 + 8 + 4] * 3
    assert found["parameters_bytes/critic"] == [88] * 3
    assert found["gradients_bytes/critic"] == [88] * 3


def test_one_model_with_two_watches_counts_once(spool):
    model = nn.Linear(10, 1)
    first = torch.optim.SGD([model.weight], lr=0.1)
    with gm.init(mode="offline") as run:
        run.watch(model, first)
        second = torch.optim.SGD([model.bias], lr=0.1, momentum=0.9)
        run.watch(model, second, name="bias")
        for _ in range(2):
            model(torch.ones(2, 10)).sum().backward()
            second.step()
            first.step()
            model.zero_grad()
    found = memory_of(recorded(run.directory).points)
    assert found["parameters_bytes"] == found["gradients_bytes"] == [44] * 2
    assert set(found["parameters_bytes/bias"]) == {0.0}
    assert set(found["optimizer_state_bytes/bias"]) == {4.0}


@pytest.fixture
def counts(monkeypatch):
    """Steps at which the tensors were walked."""
    counts = []
    original = memory_ledger.MemoryLedger._count

    def count(self):
        counts.append(self._num_steps)
        original(self)

    monkeypatch.setattr(memory_ledger.MemoryLedger, "_count", count)
    return counts


def test_tensors_are_walked_in_few_steps(spool, counts):
    model = nn.Linear(4, 1)
    found, _ = train(model, adamw(model), torch.ones(1, 4), steps=300)
    assert counts == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert len(found["parameters_bytes"]) == 300, "shown in every step all the same"


def test_what_comes_and_goes_is_seen(spool, counts):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def on_step(step):
        if step == 40:
            optimizer.add_param_group({"params": list(model[0].parameters()), "momentum": 0.9})
        if step == 70:
            # Nobody tells of this one: it is found at the next count.
            model.to(torch.float64)
            optimizer.state.clear()

    def forward(batch):
        return batch.to(model[0].weight.dtype)

    model.register_forward_pre_hook(lambda _module, args: (forward(args[0]),))
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    found, _ = train(model, optimizer, torch.ones(1, 4), steps=140, on_step=on_step)
    # At step 41 the optimizer has more parameters, and then states; step 16 after a count at the earliest.
    assert [step for step in counts if 40 < step < 64] == [48]
    state = found["optimizer_state_bytes"]
    assert (state[39], state[48]) == (0, 4 * 20)
    assert found["parameters_bytes"][60] == 4 * 25
    assert found["parameters_bytes"][127] == 8 * 25


def test_a_key_that_changes_in_every_step_does_not_make_a_walk_in_every_step(spool, counts):
    """Experts that are chosen in turn: another number of gradients in every step."""
    model = nn.ModuleList(nn.Linear(4, 1) for _ in range(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for step in range(200):
            sum(model[index](torch.ones(1, 4)).sum() for index in range(1 + step % 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
    later = [step for step in counts if step > 16]
    assert len(later) <= 200 / 16


def test_the_ledger_keeps_nothing_after_the_run(spool):
    model = nn.Linear(4, 1)
    train(model, adamw(model), torch.ones(1, 4))
    assert memory_ledger._open == []


def test_a_skipped_step_has_a_ledger_too(spool):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer, scaler)
        scaler.scale(model(torch.full((1, 4), float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    points = recorded(run.directory).points
    assert points["scaler/skipped"] == {1: 1.0}
    assert points["memory/gradients_bytes"] == {1: 20.0}


def test_a_copied_model_trains_without_a_run(spool):
    model = nn.Linear(4, 1)
    with gm.init(mode="offline") as run:
        run.watch(model, adamw(model))
        twin = copy.deepcopy(model)
        twin(torch.ones(1, 4)).sum().backward()
    assert run.failures == {}
