"""`gm.checks`: wrong gradients and wrong divisions are found, right ones pass, and everything is left as it was."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm


class ScaledBackward(torch.autograd.Function):
    """exp, whose backward pass is wrong by a factor."""

    factor = 1.01

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.exp() * ScaledBackward.factor


class TransposedBackward(torch.autograd.Function):
    """A square matrix product whose backward pass forgets a transposition."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, (x.T @ gradient).T


class SkippedBackward(torch.autograd.Function):
    """Right forward, no gradient at all."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


class Net(nn.Module):
    """Dropout, batch normalisation, an embedding, and one operation of choice in the middle."""

    def __init__(self, middle=torch.exp):
        super().__init__()
        self.embedding = nn.Embedding(50, 6)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(8, 3)
        self.middle = middle

    def forward(self, tokens):
        hidden = torch.relu(self.norm(self.first(self.embedding(tokens))))
        return self.last(self.middle(0.3 * self.dropout(hidden)))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"])


def batch(size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(50, (size,), generator=generator),
        "labels": torch.randint(3, (size,), generator=generator),
    }


def net(middle=torch.exp):
    torch.manual_seed(3)
    return Net(middle)


@pytest.mark.parametrize("training", [True, False])
def test_right_gradients_pass(training):
    result = gm.checks.gradients(net().train(training), loss_fn, batch())
    assert result.ok, str(result)
    assert result.dtype == "float64"
    assert [row.name for row in result.rows] == [name for name, _ in net().named_parameters()]
    assert all(row.num_checked > 0 for row in result.rows)
    assert "all right" in str(result)
    assert "embedding.weight" in str(result)


def test_a_gradient_wrong_by_one_percent_is_found_and_named():
    result = gm.checks.gradients(net(ScaledBackward.apply), loss_fn, batch())
    by_name = {row.name: row for row in result.rows}
    assert not result.ok
    assert not by_name["first.weight"].is_ok
    assert not by_name["embedding.weight"].is_ok
    assert by_name["last.weight"].is_ok, "it comes after the wrong operation"
    wrong = by_name["first.weight"]
    assert wrong.autograd == pytest.approx(1.01 * wrong.difference, rel=1e-4)
    assert "WRONG" in str(result)


def test_a_transposed_gradient_is_found():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.weight = nn.Parameter(torch.randn(5, 5))

        def forward(self, x):
            return TransposedBackward.apply(x, self.weight)

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 5, generator=generator)
    result = gm.checks.gradients(Product(), lambda model, x: model(x).square().mean(), x)
    assert not result.ok


@pytest.mark.parametrize("middle", [SkippedBackward.apply, torch.Tensor.detach], ids=["zeros", "detached"])
def test_a_gradient_that_is_missing_is_found(middle):
    result = gm.checks.gradients(net(middle), loss_fn, batch())
    by_name = {row.name: row for row in result.rows}
    assert not by_name["first.weight"].is_ok
    assert by_name["first.weight"].autograd == 0.0
    assert by_name["last.bias"].is_ok


def test_a_kink_is_left_out():
    class Kinked(nn.Module):
        def __init__(self):
            super().__init__()
            # The first weight sits exactly on the kink of relu.
            self.weight = nn.Parameter(torch.tensor([0.0, 1.0]))

        def forward(self, factor):
            return torch.relu(self.weight) * factor

    (row,) = gm.checks.gradients(
        Kinked(), lambda model, x: model(x).square().sum() + model(x).sum(), 2.0
    ).rows
    assert (row.num_checked, row.num_kinks) == (1, 1)
    assert row.is_ok


def test_a_model_that_refuses_float64_is_checked_in_its_own_dtype():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 3)
            self.constant = torch.full((2, 4), 0.5)

        def forward(self, x):
            return self.linear(self.constant * x.float())

    result = gm.checks.gradients(Single(), lambda model, x: model(x).square().mean(), torch.ones(2, 4))
    assert result.dtype == "float32"
    assert result.ok, str(result)


def test_only_some_parameters():
    result = gm.checks.gradients(net(), loss_fn, batch(), only=lambda name: name.startswith("last"))
    assert [row.name for row in result.rows] == ["last.weight", "last.bias"]


def state_of(model):
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: one.grad for name, one in model.named_parameters()},
        [module.training for module in model.modules()],
        torch.random.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


@pytest.mark.parametrize("check", ["gradients", "accumulation"])
def test_everything_is_left_as_it_was(check):
    model = net().train()
    model.dropout.eval()
    loss_fn(model, batch()).backward()
    before = state_of(model)
    if check == "gradients":
        gm.checks.gradients(model, loss_fn, batch(), num_coordinates=2)
    else:
        gm.checks.accumulation(model, loss_fn, [batch(4, 1), batch(4, 2)])
    after = state_of(model)
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert all(before[1][name] is after[1][name] for name in before[1])
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])
    assert before[4:] == after[4:]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x: model(x), "one element, got shape"),
        (lambda model, x: model(x).sum() * float("nan"), "the loss is nan"),
        (lambda model, x: torch.zeros(()), "no graph"),
        (lambda model, x: next(COUNTER) * model(x).sum(), "not the same twice"),
    ],
)
def test_a_loss_that_cannot_be_checked_is_refused_with_the_reason(loss, message):
    with pytest.raises(ValueError, match=message):
        gm.checks.gradients(nn.Linear(3, 2), loss, torch.ones(1, 3))


COUNTER = iter(range(1, 1000))


def test_a_loss_of_another_model_is_refused():
    other = nn.Linear(3, 2).double()
    with pytest.raises(ValueError, match="must use the model that it is given"):
        gm.checks.gradients(nn.Linear(3, 2), lambda _model, x: other(x).sum(), torch.ones(1, 3))


def micro_batches(*sizes):
    return [batch(size, seed) for seed, size in enumerate(sizes, start=1)]


def test_accumulation_divided_right():
    result = gm.checks.accumulation(net(), loss_fn, micro_batches(4, 4, 4))
    assert result.ok
    assert result.ratio == pytest.approx(1.0, abs=1e-9)
    assert ": right;" in str(result)


def test_accumulation_not_divided():
    result = gm.checks.accumulation(net(), loss_fn, micro_batches(4, 4, 4), divisor=1)
    assert not result.ok
    assert result.ratio == pytest.approx(3.0)
    assert result.message == "Divide each loss by 3 instead of 1."
    assert "WRONG" in str(result)


def test_accumulation_over_unequal_micro_batches():
    result = gm.checks.accumulation(net(), loss_fn, micro_batches(7, 2))
    assert not result.ok
    assert "number of samples or tokens" in result.message


def test_accumulation_with_batch_normalisation_in_training():
    result = gm.checks.accumulation(net(), loss_fn, micro_batches(8, 8), train=True)
    assert not result.ok
    assert "Batch normalisation" in result.message


def test_accumulation_with_a_given_whole_batch():
    parts = micro_batches(3, 3)
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    assert gm.checks.accumulation(net(), loss_fn, parts, whole=whole).ok


@pytest.mark.parametrize("parts", [[], [torch.tensor(1.0), torch.tensor(2.0)], ["a", "b"]])
def test_micro_batches_that_cannot_be_joined_are_refused(parts):
    with pytest.raises(ValueError, match=r"no micro-batches|whole="):
        gm.checks.accumulation(net(), loss_fn, parts)


def test_the_module_can_be_imported_without_torch():
    program = "import sys; sys.modules['torch'] = None; import gradiometer as gm; print(gm.checks.gradients.__name__)"
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True)
    assert done.stdout == b"gradients\n"


class HalfOfComplex(torch.autograd.Function):
    """Multiplies complex numbers; one part of its backward pass is wrong."""

    part = "imaginary"

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        wrong = gradient * x.conj()
        if HalfOfComplex.part == "imaginary":
            wrong = torch.complex(wrong.real, -wrong.imag)
        elif HalfOfComplex.part == "real":
            wrong = torch.complex(1.01 * wrong.real, wrong.imag)
        return gradient * weight.conj(), wrong


class ComplexNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return HalfOfComplex.apply(x, self.weight).sum(1) * self.scale + self.shift


def complex_loss(model, x):
    return model(x).abs().square().mean()


@pytest.mark.parametrize("part", ["none", "real", "imaginary"])
def test_both_parts_of_complex_parameters_are_compared(monkeypatch, part):
    monkeypatch.setattr(HalfOfComplex, "part", part)
    x = torch.randn(5, 4, 3, dtype=torch.complex64)
    result = gm.checks.gradients(ComplexNet(), complex_loss, x, num_coordinates=24)
    rows = {row.name: row for row in result.rows}
    assert result.dtype == "float64"
    assert rows["weight"].shape == (4, 3)
    assert rows["weight"].num_checked == 24
    assert rows["weight"].is_ok == (part == "none")
    assert rows["scale"].is_ok


def test_accumulation_with_complex_parameters(monkeypatch):
    parts = [torch.randn(3, 4, 3, dtype=torch.complex64) for _ in range(2)]
    monkeypatch.setattr(HalfOfComplex, "part", "none")
    assert gm.checks.accumulation(ComplexNet(), complex_loss, parts).ok
    assert gm.checks.accumulation(ComplexNet(), complex_loss, parts, divisor=1).ratio == pytest.approx(2.0)
