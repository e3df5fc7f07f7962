"""The Triton kernel against the definition, in Triton's own interpreter on the CPU. `test_kernel.py` runs this file in a
process of its own with TRITON_INTERPRET=1: Triton looks at it when it is imported, which torch may have done long before.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from gradiometer.capture import kernel, statistics
from gradiometer.capture.backends import Backends, Found
from gradiometer.capture.statistics import COUNT, MAX, MIN, NUM_NONFINITE, NUM_ZEROS, SUM, SUM_SQUARES

CPU = torch.device("cpu")
CHUNK, BLOCK = 512, 64
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

pytestmark = [
    # numpy does the interpreter's arithmetic, and warns where the kernel means to overflow.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def make(dtype=torch.float32):
    return kernel.MultiTensor(CPU, dtype, chunk=CHUNK, block=BLOCK)


def expected(gradients):
    return np.stack([statistics.exact(one.to(torch.float64).numpy()) for one in gradients])


def assert_rows(rows, gradients, rtol=1e-5):
    """Counts and extremes exactly, sums up to the rounding of float32."""
    exact = expected(gradients)
    for column in (COUNT, MIN, MAX, NUM_ZEROS, NUM_NONFINITE):
        assert rows[:, column].tolist() == pytest.approx(exact[:, column].tolist(), rel=0, abs=0, nan_ok=True)
    assert_allclose(rows[:, SUM_SQUARES], exact[:, SUM_SQUARES], rtol=rtol)
    size = np.sqrt(np.where(np.isfinite(exact[:, SUM_SQUARES]), exact[:, SUM_SQUARES], 0) * exact[:, COUNT])
    for row, truth, scale in zip(rows, exact, size, strict=True):
        assert_allclose(row[SUM], truth[SUM], rtol=rtol, atol=1e-6 * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_all_sizes_in_one_table(dtype):
    generator = torch.Generator().manual_seed(1)
    sizes = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
    gradients = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    for gradient in gradients[3:]:
        gradient[::7] = 0.0
    assert_rows(make(dtype).read(gradients).values(), gradients)


def test_sums_that_float32_cannot_hold_are_added_in_float64():
    large = torch.full((CHUNK + 3,), 1e30)
    small = torch.full((CHUNK + 3,), 1e-25)
    both = torch.cat([torch.zeros(CHUNK), torch.full((9,), -1e-30), torch.full((9,), 3e38)])
    gradients = [large, small, both, torch.full((4,), 3.4e38), torch.full((5,), 1e-45)]
    assert_rows(make().read(gradients).values(), gradients)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinities_show_as_ieee_arithmetic_has_them(dtype):
    def with_(place, value, size=2 * CHUNK + 9):
        gradient = torch.linspace(-1, 1, size).to(dtype)
        gradient[place] = value
        return gradient

    inf, nan = float("inf"), float("nan")
    gradients = [
        with_(0, nan),
        with_(-1, inf),
        with_(CHUNK, -inf),
        with_([3, CHUNK + 3], torch.tensor([inf, -inf]).to(dtype)),
        torch.full((BLOCK + 1,), nan).to(dtype),
    ]
    assert_rows(make(dtype).read(gradients).values(), gradients)


def test_views_at_odd_addresses_and_transposed_gradients_are_read_where_they_are():
    bucket = torch.arange(4000.0)
    gradients = [
        bucket[1:700],
        bucket[703:705],
        bucket[800:1400].view(20, 30).t(),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        bucket[::2],
    ]
    assert_rows(make().read(gradients).values(), gradients)


def test_the_same_gradients_give_the_same_bits():
    gradients = [torch.randn(5 * CHUNK + 1), torch.randn(17)]
    one = make()
    assert len({one.read(gradients).values().tobytes() for _ in range(3)}) == 1
    assert make().read(gradients).values().tobytes() == one.read(gradients).values().tobytes()


def test_tables_are_kept_while_they_hold_and_made_anew_when_they_do_not():
    one = make()
    gradients = [torch.randn(100), torch.randn(50)]
    one.read(gradients)
    plan, addresses = next(iter(one._plans.values())), one._addresses
    one.read(gradients)
    assert one._addresses is addresses
    again = [gradient.clone() for gradient in gradients]
    assert_rows(one.read(again).values(), again)
    assert one._addresses is not addresses
    assert list(one._plans.values()) == [plan]
    for count in range(1, 12):
        fewer = [torch.randn(count)]
        assert_rows(one.read(fewer).values(), fewer)
    assert len(one._plans) <= 8


def test_the_self_test_tells_a_kernel_that_is_wrong(monkeypatch):
    one = make()
    assert kernel.self_test(one) is None
    original = one.read
    monkeypatch.setattr(one, "read", lambda gradients: original([gradient * 1.01 for gradient in gradients]))
    assert "self-test" in kernel.self_test(one)


def test_why_the_kernel_is_not_in_use(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(kernel, "_known", {})
    assert kernel.prepare(device, {torch.float32}) == "TRITON_INTERPRET=1"
    assert not kernel.is_ready(device, torch.float32)
    monkeypatch.setattr(kernel, "_known", {})
    monkeypatch.setenv(kernel.VARIABLE, "0")
    assert kernel.prepare(device, {torch.float32}) == "GRADIOMETER_TRITON=0"
    monkeypatch.setattr(kernel, "_known", {})
    monkeypatch.delenv(kernel.VARIABLE)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "float8" in kernel.prepare(device, {torch.float8_e4m3fn})
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "cannot be imported" in kernel.prepare(device, {torch.float32})


def test_where_triton_cannot_launch_torch_does_the_work(monkeypatch):
    monkeypatch.setattr(kernel, "_known", {})
    monkeypatch.delenv("TRITON_INTERPRET")
    # No GPU here: torch and Triton refuse, and that is a reason like any other.
    reason = kernel.prepare(torch.device("cuda", 0), {torch.float32})
    assert (reason is None) == torch.cuda.is_available()


def test_gradients_go_to_the_kernel_once_it_is_ready(monkeypatch):
    monkeypatch.setattr(kernel, "is_ready", lambda device, dtype: True)
    calls = []

    class Recorded(kernel.MultiTensor):
        def read(self, gradients):
            calls.append(len(gradients))
            return super().read(gradients)

    class OnCuda:
        """Stands for the device of gradients that this machine cannot hold."""

        type = "cuda"

    monkeypatch.setattr(kernel, "MultiTensor", lambda device, dtype: Recorded(CPU, dtype, chunk=64, block=16))
    gradients = [torch.tensor([3.0, 4.0]), torch.zeros(3)]
    found = Found()
    found.dense[OnCuda(), torch.float32] = ([0, 1], gradients)
    backends = Backends()
    ((rows, block),) = backends.read(found, full=True)
    assert (rows, block.values().tolist()) == ([0, 1], expected(gradients).tolist())
    ((_, norms),) = backends.read(found, full=False)
    assert norms.values().tolist() == [[2, 25, 0], [3, 0, 0]]
    assert calls == [2, 2]
