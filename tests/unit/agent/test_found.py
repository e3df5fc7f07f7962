"""Gradients that are all alike are taken together; one that is not sends all of them the long way."""

from __future__ import annotations

import pytest
import torch

from gradiometer.capture.backends import Found


def plain(num=3, dtype=torch.float32):
    return [torch.randn(2, 3).to(dtype) for _ in range(num)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_together_is_the_same_as_one_by_one(dtype):
    gradients = plain(dtype=dtype)
    together, one_by_one = Found(), Found()
    assert together.add_alike([0, 2, 5], gradients)
    for row, gradient in zip([0, 2, 5], gradients, strict=True):
        one_by_one.add(row, gradient)
    assert together.dense.keys() == one_by_one.dense.keys() == {(torch.device("cpu"), dtype)}
    assert together.rows() == one_by_one.rows() == [0, 2, 5]
    (found,) = together.dense.values()
    assert [id(gradient) for gradient in found[1]] == [id(gradient) for gradient in gradients]


ODD = {
    "missing": lambda: None,
    "empty": lambda: torch.empty(0, 3),
    "another type": lambda: torch.randn(2).double(),
    "integers": lambda: torch.arange(2),
    "complex": lambda: torch.randn(2, dtype=torch.complex64),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "a subclass": lambda: torch.randn(2).as_subclass(type("Wrapped", (torch.Tensor,), {})),
    "elsewhere": lambda: torch.randn(2, device="meta"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("num_plain", [0, 2])
def test_one_that_is_odd_is_not_taken_so(odd, num_plain):
    one = ODD[odd]()
    found = Found()
    is_alone_and_fine = odd == "another type" and num_plain == 0
    assert found.add_alike(list(range(num_plain + 1)), [*plain(num_plain), one]) is is_alone_and_fine
    assert bool(found.rows()) is is_alone_and_fine


def test_no_gradients_at_all():
    assert not Found().add_alike([], [])
