"""The cheap recipes agree with the definition of the statistics, also where float32 ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from gradiometer import wire
from gradiometer.capture import eager, statistics
from gradiometer.capture.statistics import COUNT, MAX, MIN, NUM_NONFINITE, NUM_ZEROS, SUM, SUM_SQUARES, WIDTH

READERS = pytest.mark.parametrize("read", [eager.read_cpu, eager.read_device], ids=["cpu", "device"])


def gradient(size, seed=0, dtype=torch.float32, scale=1e-3):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator) * scale).to(dtype)


def definition(tensor):
    return statistics.exact(tensor.to(torch.float64).numpy())


def assert_rows_agree(row, expected, relative=2e-6):
    assert_array_equal(row[[COUNT, NUM_ZEROS, NUM_NONFINITE]], expected[[COUNT, NUM_ZEROS, NUM_NONFINITE]])
    assert_array_equal(row[[MIN, MAX]], expected[[MIN, MAX]])
    assert_allclose(row[SUM_SQUARES], expected[SUM_SQUARES], rtol=relative)
    # The sum cancels, so its error is measured against the size of the terms.
    size = math.sqrt(expected[SUM_SQUARES] * expected[COUNT]) if math.isfinite(expected[SUM_SQUARES]) else 0.0
    assert_allclose(row[SUM], expected[SUM], rtol=relative, atol=relative * size)


def test_the_definition_on_a_gradient_that_can_be_done_by_hand():
    row = statistics.exact(np.array([0.0, -2.0, 3.0, 0.0]))
    assert row.tolist() == [4, 1, 13, -2, 3, 2, 0]


def test_the_definition_shows_nan_and_infinities_as_ieee_does():
    row = statistics.exact(np.array([1.0, math.inf, -math.inf, math.nan]))
    assert row[[COUNT, NUM_ZEROS, NUM_NONFINITE]].tolist() == [4, 0, 3]
    assert np.isnan(row[[SUM, SUM_SQUARES, MIN, MAX]]).all()
    row = statistics.exact(np.array([1.0, math.inf]))
    assert row.tolist() == [2, math.inf, math.inf, 1, math.inf, 0, 1]


def test_an_empty_gradient_has_count_zero():
    assert statistics.exact(np.zeros(0)).tolist() == [0.0] * WIDTH


@READERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_ordinary_gradients_of_every_type(read, dtype):
    tensors = [
        gradient(shape, seed, dtype)
        for seed, shape in enumerate([(7, 5), (1,), (), (64, 3, 3, 3), (300, 700)])
    ]
    tensors[0].view(-1)[3:9] = 0
    rows = read(tensors).values()
    assert rows.shape == (len(tensors), WIDTH)
    for row, tensor in zip(rows, tensors, strict=True):
        assert_rows_agree(row, definition(tensor))


@READERS
@pytest.mark.parametrize(
    "bad", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.inf, math.nan]]
)
def test_non_finite_values_show_in_the_row_of_their_own_parameter_only(read, bad):
    spoiled, healthy = gradient(1000), gradient(1000, seed=1)
    spoiled[5 : 5 + len(bad)] = torch.tensor(bad)
    rows = read([spoiled, healthy]).values()
    assert_rows_agree(rows[0], definition(spoiled))
    assert_rows_agree(rows[1], definition(healthy))
    assert rows[0][NUM_NONFINITE] == len(bad)


@READERS
@pytest.mark.parametrize("value", [1e30, -3e38, 1e-30, 1e-44])
def test_finite_gradients_whose_squares_leave_float32(read, value):
    tensor = torch.full((50,), value)
    row = read([tensor]).values()[0]
    expected = definition(tensor)
    if read is eager.read_device:
        # float32 sums overflow at 3.4e38; the device recipe may not look and branch.
        row, expected = np.delete(row, SUM), np.delete(expected, SUM)
    assert_allclose(row, expected, rtol=1e-5)
    assert np.isfinite(row).all()


@READERS
def test_all_zeros(read):
    assert read([torch.zeros(40_000)]).values()[0].tolist() == [40_000, 0, 0, 0, 0, 40_000, 0]


@READERS
def test_memory_formats_and_holes(read):
    channels_last = gradient((8, 4, 5, 5)).to(memory_format=torch.channels_last)
    transposed = gradient((30, 20)).t()
    with_holes = gradient((30, 20))[:, ::3]
    expanded = gradient((1, 20)).expand(30, 20)
    tensors = [channels_last, transposed, with_holes, expanded]
    for row, tensor in zip(read(tensors).values(), tensors, strict=True):
        assert_rows_agree(row, definition(tensor))


def test_a_large_gradient_is_summed_to_seven_digits():
    tensor = gradient(3_000_001)
    row = eager.read_cpu([tensor]).values()[0]
    expected = definition(tensor)
    assert abs(row[SUM_SQUARES] / expected[SUM_SQUARES] - 1) < 1e-6
    # The one-call norm of torch, for comparison, is the reason for the recipe.
    assert abs(float(torch.linalg.vector_norm(tensor)) ** 2 / expected[SUM_SQUARES] - 1) > 1e-5


def test_sparse_gradients_count_their_implicit_zeros():
    dense = torch.zeros(6, 3)
    dense[1] = torch.tensor([1.0, 0.0, 2.0])
    indices = torch.tensor([[1, 1]])
    sparse = torch.sparse_coo_tensor(
        indices, torch.stack([dense[1] / 2, dense[1] / 2]), (6, 3), check_invariants=True
    )
    assert_array_equal(eager.read_sparse(sparse).values()[0], definition(dense))
    full = torch.sparse_coo_tensor(
        torch.tensor([[0, 1]]), torch.tensor([[1.0], [2.0]]), (2, 1), check_invariants=True
    )
    assert eager.read_sparse(full).values()[0][MIN] == 1.0


def test_unscaling_the_statistics_is_as_good_as_unscaling_the_gradient():
    tensor = gradient(1000)
    scaled = eager.read_cpu([tensor * 1024.0]).values()
    assert_allclose(statistics.unscale(scaled, 1024.0)[0], definition(tensor), rtol=2e-6, atol=1e-12)


def test_unscaling_by_a_scale_that_has_collapsed_does_not_warn_or_raise():
    row = statistics.unscale(np.tile([4.0, 1, 1, 1, 1, 1, 0], (1, 1)), 0.0)[0]
    assert row[COUNT] == 4
    assert np.isinf(row[SUM_SQUARES])
    assert row[NUM_NONFINITE] == 4, "nothing finite is left"
    norms = statistics.unscale(np.array([[4.0, 1.0, 0.0]]), float("nan"), wire.NORM_STATISTICS)
    assert norms[0, 2] == 4


@READERS
def test_reading_changes_nothing_and_keeps_nothing(read):
    tensor = gradient(1000).requires_grad_()
    before = tensor.detach().clone()
    random_state = torch.get_rng_state()
    with torch.no_grad():
        table = read([tensor])
    assert torch.equal(tensor.detach(), before)
    assert tensor._version == 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert table.values().shape == (1, WIDTH)
