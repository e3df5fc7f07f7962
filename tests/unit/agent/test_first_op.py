"""Which operation is named: the one that made a non-finite value, not one that passed it on or was told to write it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradiometer.capture.first_op import Finder, Modules, Search, is_finite


def search_of(model, loss_of, **named):
    search, modules = Search(), Modules(model)
    for name, parameter in model.named_parameters():
        search.name(parameter, name, is_weight=True)
    for name, tensor in named.items():
        search.name(tensor, name)
    with torch.autograd.set_detect_anomaly(True, check_nan=False), Finder(search, modules):
        loss_of(model).backward()
    modules.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return search


class Distance(nn.Module):
    """Finite in the forward pass; the square root's derivative at 0 is infinite."""

    def forward(self, x):
        return torch.sqrt((x * x).sum(-1))


class Attention(nn.Module):
    def __init__(self, *, masks_all=False):
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.masks_all = masks_all

    def forward(self, x):
        scores = self.query(x) @ x.T
        future = torch.ones(3, 3, dtype=torch.bool).triu(0 if self.masks_all else 1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return weights @ x


def seeded(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_an_operation_of_the_backward_pass_is_named_with_the_module_that_it_belongs_to():
    model = seeded(nn.Sequential(nn.Linear(4, 4), Distance()))
    with torch.no_grad():
        model[0].bias.zero_()
    found = search_of(model, lambda net: net(torch.zeros(2, 4)).sum()).found
    assert (found.phase, found.module, found.node) == ("backward", "1", "SqrtBackward0")
    assert found.op == "aten.div.Tensor"
    assert "torch.sqrt((x * x).sum(-1))" in found.place
    assert found.received == ""
    assert (found.output.num_nan, found.output.num_inf) == (0, 2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_an_attention_mask_is_no_fault_but_a_row_that_masks_everything_is():
    x = torch.randn(3, 4)
    search = search_of(seeded(Attention()), lambda net: net(x).sum())
    assert search.found is None
    assert search.num_ops > 10
    found = search_of(seeded(Attention(masks_all=True)), lambda net: net(x).sum()).found
    assert found.op == "aten._softmax.default"
    assert found.output.num_nan == 3
    assert found.inputs[0].num_inf > 0


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_weight_that_was_infinite_already_is_named():
    model = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with torch.no_grad():
        model[1].weight[0, 0] = math.inf
    found = search_of(model, lambda net: net(torch.ones(2, 4)).sum()).found
    assert (found.received, found.module, found.phase) == ("1.weight", "1", "forward")
    assert found.op.startswith("aten.addmm")
    assert found.place


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_nan_in_the_batch_is_named_by_its_place():
    x = torch.ones(2, 4)
    x[1, 1] = math.nan
    found = search_of(seeded(nn.Linear(4, 4)), lambda net: net(x).sum(), **{"batch[0]['x']": x}).found
    assert found.received == "batch[0]['x']"


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_loss_outside_all_modules_and_an_operation_in_place():
    model = seeded(nn.Linear(4, 4))

    def loss_of(net):
        y = net(torch.ones(2, 4)).abs() + 1.0
        y.mul_(1e30)
        return y.mul_(1e30).sum()

    found = search_of(model, loss_of).found
    assert (found.op, found.module, found.phase) == ("aten.mul_.Tensor", "", "forward")
    assert found.inputs[0].num_inf == 0


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_uninitialised_memory_is_not_looked_at():
    model = seeded(nn.Linear(4, 4))

    def loss_of(net):
        scratch = torch.empty(1000)
        scratch.fill_(math.inf)
        return net(torch.ones(2, 4)).sum() + scratch.zero_().sum()

    assert search_of(model, loss_of).found is None
    assert is_finite([torch.ones(2)])
    assert not is_finite([torch.ones(2), torch.tensor([math.inf])])
