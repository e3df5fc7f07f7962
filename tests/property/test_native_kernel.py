"""The native kernel, its portable half and the torch recipe all agree with the definition, whatever the numbers."""

from __future__ import annotations

import math
import shutil
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from gradiometer.capture import eager, native, recipe, statistics
from gradiometer.capture.native import build
from gradiometer.capture.statistics import COUNT, MAX, MIN, NUM_NONFINITE, NUM_ZEROS, SUM, SUM_SQUARES, WIDTH

WIDTHS = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}
DTYPES = pytest.mark.parametrize("dtype", list(WIDTHS), ids=lambda dtype: str(dtype)[6:])


def kernels():
    loaded = native.load()
    if loaded is None:
        return []
    return [loaded, native.Kernel(loaded._library, native.PORTABLE)]


KERNELS = pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: f"path{kernel._path}")


def has_nonfinite(kernel, tensor):
    code = native._torch_dtypes()[tensor.dtype]
    return kernel.has_nonfinite(tensor.data_ptr(), tensor.numel(), code)


def all_partials(tensors):
    """Rows by every way there is, and how exact their sums are; the recipe is never given an empty tensor."""
    # Equal elements in torch's float32 norm of a row: rounding errors add up instead of cancelling.
    yield recipe.partials([eager.flat(tensor) for tensor in tensors if tensor.numel()]), 2e-5
    keep = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    for kernel in kernels():
        rows = kernel.partials(native.table_of(tensors, eager.flat))
        empty = [row.tolist() for index, row in enumerate(rows) if index not in keep]
        assert empty == [[0.0] * WIDTH] * len(empty)
        yield rows[keep], 2e-6


def definition(tensor):
    return statistics.exact(tensor.detach().to(torch.float64).numpy())


def assert_agree(rows, tensors, relative=2e-6):
    expected = np.stack([definition(tensor) for tensor in tensors])
    exactly = [COUNT, MIN, MAX, NUM_ZEROS, NUM_NONFINITE]
    assert_array_equal(rows[:, exactly], expected[:, exactly])
    assert_allclose(rows[:, SUM_SQUARES], expected[:, SUM_SQUARES], rtol=relative)
    for row, wanted in zip(rows, expected, strict=True):
        # Where float64 itself overflows, a sum depends on the order of its terms.
        if not np.isinf(wanted[SUM_SQUARES]) or wanted[NUM_NONFINITE]:
            size = math.sqrt(wanted[SUM_SQUARES] * wanted[COUNT]) if wanted[SUM_SQUARES] < math.inf else 0.0
            assert_allclose(row[SUM], wanted[SUM], rtol=relative, atol=relative * size + 1e-307)


@st.composite
def gradients(draw, dtype):
    """A few numbers of all kinds, repeated to a length around the kernel's lanes, turns and blocks."""
    # Beyond 1e154 the squares of float64 overflow in the definition too, and mixed with infinities so does the sum.
    largest = {"min_value": -1e150, "max_value": 1e150} if dtype == torch.float64 else {}
    finite = st.floats(width=WIDTHS[dtype], allow_nan=False, allow_infinity=False, **largest)
    special = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 6e-8, 1e-45, 1e-30, -1e30])
    values = draw(st.lists(finite | special, max_size=40))
    length = draw(st.integers(0, 90) | st.sampled_from([255, 256, 257, 4095, 4096, 4097, 8191, 9000]))
    tile = torch.tensor(values * (length // max(1, len(values)) + 1), dtype=torch.float64)[:length]
    offset = draw(st.integers(0, min(3, tile.numel())))
    return tile.to(dtype)[offset:]


def test_the_kernel_is_built_where_there_is_a_compiler():
    if sys.platform == "linux" and any(shutil.which(name) for name in build.COMPILERS):
        assert native.load() is not None, native.why_not()
        assert len(kernels()) == 2


@DTYPES
@given(data=st.data())
def test_any_gradient_has_the_statistics_of_the_definition(dtype, data):
    tensors = data.draw(st.lists(gradients(dtype), min_size=1, max_size=3))
    not_empty = [tensor for tensor in tensors if tensor.numel()]
    if not_empty:
        for rows, relative in all_partials(tensors):
            assert_agree(rows, not_empty, relative)


@DTYPES
@given(data=st.data())
def test_any_gradient_has_the_norm_of_the_definition(dtype, data):
    tensor = data.draw(gradients(dtype).filter(torch.Tensor.numel))
    wanted = definition(tensor)
    num_nonfinite = 0.0 if math.isfinite(wanted[SUM_SQUARES]) else wanted[NUM_NONFINITE]
    expected = [[wanted[COUNT], wanted[SUM_SQUARES], num_nonfinite]]
    for kernel in kernels():
        assert_allclose(kernel.norms(native.table_of([tensor], eager.flat)), expected, rtol=2e-6)
    assert_allclose(recipe.norms([tensor]), expected, rtol=2e-5)


@example(
    values=[0.0, -0.0, 1e-310, 5e-324, 2.0**-126, -(2.0**-127), 1.0, 1.5, 2.0**127, 1e300, math.inf, math.nan]
)
@given(values=st.lists(st.floats(), min_size=1, max_size=60))
@DTYPES
def test_a_histogram_counts_every_element_in_the_bin_of_its_power_of_two(dtype, values):
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    wanted = np.zeros(native.NUM_BINS)
    for value in tensor.to(torch.float64).tolist():
        if math.isfinite(value):
            exponent = math.frexp(value)[1] - 1 if value else -1000
            wanted[min(max(exponent + 127, 0), 254)] += 1
        else:
            wanted[255] += 1
    for kernel in kernels():
        assert_array_equal(kernel.histograms(native.table_of([tensor], eager.flat)), [wanted])
    assert_array_equal(eager._bins_of_cpu(tensor), wanted)
    assert_array_equal(eager._bins_of_device(tensor).numpy(), wanted)


@DTYPES
@given(data=st.data())
def test_what_is_not_finite_is_found_anywhere_and_nothing_else_is(dtype, data):
    tensor = data.draw(gradients(dtype))
    for kernel in kernels():
        assert has_nonfinite(kernel, tensor) == (not bool(torch.isfinite(tensor).all()))


@KERNELS
@DTYPES
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_found_in_every_place(kernel, dtype, value):
    largest = torch.finfo(dtype).max
    for length in (1, 7, 64, 65, 200):
        for place in range(length):
            tensor = torch.full((length + 2,), largest, dtype=dtype)
            tensor[place + 1] = value
            assert has_nonfinite(kernel, tensor[1:-1])
            # Its neighbours are not looked at.
            assert not has_nonfinite(kernel, tensor[: place + 1])
            assert not has_nonfinite(kernel, tensor[place + 2 :])
    for place in (4095, 4096, 8191, 8192, 9000):
        tensor = torch.full((9001,), -largest, dtype=dtype)
        assert not has_nonfinite(kernel, tensor)
        tensor[place] = value
        assert has_nonfinite(kernel, tensor)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_precision_number_is_finite_or_not(kernel, dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    found = [has_nonfinite(kernel, one) for one in every.split(1)]
    assert found == (~torch.isfinite(every)).tolist()


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_precision_number_is_converted_exactly(kernel, dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    # 19 times each: two whole vectors and a rest.
    tensors = list(every.repeat_interleave(19).split(19))
    rows = kernel.partials(native.table_of(tensors, eager.flat))
    wanted = every.to(torch.float64).numpy()
    assert_array_equal(rows[:, MIN], wanted)
    assert_array_equal(rows[:, MAX], wanted)
    assert_array_equal(rows[:, NUM_NONFINITE], np.where(np.isfinite(wanted), 0, 19))


@KERNELS
def test_memory_that_is_not_contiguous(kernel):
    tensors = [
        torch.randn(8, 4, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(30, 20).t(),
        torch.randn(30, 20)[:, ::3],
        torch.randn(1, 20).expand(30, 20),
        torch.randn(()),
    ]
    assert_agree(kernel.partials(native.table_of(tensors, eager.flat)), tensors)


@pytest.mark.parametrize("value", [0.1, 1e-3, 3e-7])
def test_a_norm_of_many_equal_elements_is_good_to_a_millionth(value):
    """Rounding errors of equal terms do not cancel, which is the worst case of adding in float32."""
    tensor = torch.full((10_000_001,), value)
    for kernel in kernels():
        table = native.table_of([tensor], eager.flat)
        for sum_squares in (kernel.partials(table)[0, SUM_SQUARES], kernel.norms(table)[0, 1]):
            wanted = math.sqrt(tensor.numel()) * float(tensor[0])
            assert math.sqrt(sum_squares) == pytest.approx(wanted, rel=1e-6)


@KERNELS
def test_one_block_in_sixteen_is_a_sample_from_the_whole_gradient(kernel):
    tensor = torch.cat([torch.full((4096,), 2.0**-index) for index in range(33)])
    (bins,) = kernel.histograms(native.table_of([tensor], eager.flat), native.SAMPLE_EVERY)
    assert {int(bin_) - 127: int(bins[bin_]) for bin_ in np.flatnonzero(bins)} == {
        0: 4096,
        -16: 4096,
        -32: 4096,
    }


@KERNELS
def test_the_kernel_releases_nothing_it_was_not_given_and_writes_nothing_beside_its_rows(kernel):
    tensors = [torch.randn(5), torch.randn(5000).half(), torch.randn(0)]
    before = [tensor.clone() for tensor in tensors]
    rows = kernel.partials(native.table_of(tensors, eager.flat))
    assert rows.shape == (3, WIDTH)
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))
    assert all(tensor._version == 0 for tensor in tensors)
