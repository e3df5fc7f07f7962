"""What is known to be finite is finite; whatever the kernel cannot read in place is not known."""

from __future__ import annotations

import math

import pytest
import torch

from gradiometer.capture import finite, native

NEEDS_KERNEL = pytest.mark.skipif(native.load() is None, reason="no native kernel")


CASES = {
    "contiguous": (lambda: torch.randn(3, 5), True),
    "a scalar": (lambda: torch.tensor(1.0), True),
    "empty storage, no elements": (lambda: torch.empty(0), False),
    "double": (lambda: torch.randn(70, dtype=torch.float64), True),
    "half": (lambda: torch.randn(70).half(), True),
    "bfloat16": (lambda: torch.randn(70).bfloat16(), True),
    "needs a gradient": (lambda: torch.randn(3, requires_grad=True) * 2, True),
    "channels last": (lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
    "transposed": (lambda: torch.randn(3, 5).t(), True),
    "permuted": (lambda: torch.randn(2, 3, 4, 5).permute(1, 0, 3, 2), True),
    "a part of a tensor": (lambda: torch.full((9,), math.nan).fill_(1.0)[3:6], True),
    "negatives": (lambda: torch._neg_view(torch.randn(4)), True),
    "with gaps": (lambda: torch.randn(3, 6)[:, ::2], False),
    "expanded": (lambda: torch.randn(3, 1).expand(3, 4), False),
    "integers": (lambda: torch.arange(3), False),
    "complex": (lambda: torch.randn(3, dtype=torch.complex64), False),
    "meta": (lambda: torch.randn(3, device="meta"), False),
    "a subclass": (lambda: torch.randn(3).as_subclass(type("Wrapped", (torch.Tensor,), {})), False),
    "zeros without memory": (lambda: torch._efficientzerotensor(3), False),
}


@NEEDS_KERNEL
@pytest.mark.parametrize("case", CASES)
def test_what_is_known(case):
    make, is_known = CASES[case]
    assert finite.tester()(make()) is is_known


@NEEDS_KERNEL
@pytest.mark.parametrize("case", [name for name, (_, is_known) in CASES.items() if is_known])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_element_is_left_out(case, value):
    is_known_finite = finite.tester()
    tensor = CASES[case][0]().detach()
    for place in range(tensor.numel()):
        flat = torch.unravel_index(torch.tensor(place), tensor.shape)
        before = tensor[flat].clone()
        tensor[flat] = value
        assert not is_known_finite(tensor)
        tensor[flat] = before
    assert is_known_finite(tensor)


@NEEDS_KERNEL
def test_neighbours_in_memory_are_not_looked_at():
    tensor = torch.full((30,), math.nan)
    tensor[10:20] = 1.0
    assert finite.tester()(tensor[10:20])
    assert not finite.tester()(tensor[10:21])


def test_without_the_kernel_nothing_is_known(monkeypatch):
    monkeypatch.setattr(native, "_loaded", lambda: (None, "for this test"))
    assert finite.tester()(torch.ones(3)) is False
