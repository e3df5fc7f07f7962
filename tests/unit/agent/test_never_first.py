"""Modules that the forward probe passes over must make nothing but finite numbers of finite numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradiometer.capture import forward

ARGUMENTS = {
    nn.MaxPool1d: (2,),
    nn.MaxPool2d: (2,),
    nn.MaxPool3d: (2,),
    nn.Softmax: (-1,),
    nn.Unflatten: (0, (1, -1)),
    nn.Flatten: (0,),
}
SHAPES = {nn.MaxPool1d: (1, 8), nn.MaxPool2d: (1, 2, 4), nn.MaxPool3d: (1, 2, 2, 2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", sorted(forward._NEVER_FIRST, key=lambda kind: kind.__name__))
def test_a_module_that_is_passed_over_keeps_finite_numbers_finite(kind, dtype):
    limits = torch.finfo(dtype)
    sizes = torch.tensor([limits.max, limits.max / 2, 88.8, limits.tiny], dtype=torch.float64)
    values = torch.cat([sizes, -sizes]).to(dtype).reshape(SHAPES.get(kind, (8,)))
    made = kind(*ARGUMENTS.get(kind, ()))
    assert made(values).isfinite().all()
