"""The deviation has the digits that docs/statistics.md says, from the reading to what is derived on the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradiometer.capture import eager, native, recipe
from gradiometer_server.fold.derive import derive_layers


def error_of_std(read, ratio):
    noise = np.random.default_rng(0).standard_normal(1_000_000)
    noise = (noise - noise.mean()) / noise.std()
    gradient = torch.tensor(1e-3 * (1.0 + noise / ratio), dtype=torch.float32)
    return abs(derive_layers(read([gradient]))["std"][0] / gradient.double().numpy().std() - 1.0)


@pytest.mark.parametrize(("ratio", "most"), [(1, 1e-6), (10, 2e-5), (100, 2e-3)])
def test_torch_operations(ratio, most):
    assert error_of_std(recipe.partials, ratio) < most


@pytest.mark.parametrize(("ratio", "most"), [(1, 1e-8), (10, 1e-6), (100, 2e-5), (1000, 1e-3)])
def test_the_native_kernel(ratio, most):
    if native.load() is None:
        pytest.skip("there is no native kernel here")
    assert error_of_std(lambda gradients: eager.read_cpu(gradients).values(), ratio) < most
