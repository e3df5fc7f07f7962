"""Every float64 and every step comes back bit for bit, and damage is noticed."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradiometer_server.domain.absent import ABSENT
from gradiometer_server.summaries import codec

any_bits = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
float32_values = st.floats(width=32, allow_nan=False)
special = st.sampled_from([float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 2.0**-149, float(ABSENT)])


def bits(values: np.ndarray) -> list[int]:
    return np.ascontiguousarray(values, np.float64).reshape(-1).view(np.uint64).tolist()


@given(st.lists(any_bits | special | float32_values, min_size=1, max_size=200))
def test_values_come_back_bit_for_bit(items: list[float]) -> None:
    values = np.array(items, np.float64)[:, None]
    back = codec.decode_values(codec.encode_values(values), len(items), 1)
    assert bits(back) == bits(values)


@given(st.lists(special | float32_values, min_size=1, max_size=100))
def test_exact_float32_values_are_kept_as_float32(items: list[float]) -> None:
    values = np.array([x for x in items if abs(x) != 5e-324] or [0.0])[:, None]
    assert codec.narrow(values).dtype == np.float32
    assert bits(codec.narrow(values).astype(np.float64)) == bits(values)


def test_a_nan_that_float32_cannot_hold_keeps_the_block_wide() -> None:
    wide_nan = np.array([0x7FF8000000000001], np.uint64).view(np.float64)[:, None]
    assert codec.narrow(wide_nan).dtype == np.float64
    assert bits(codec.decode_values(codec.encode_values(wide_nan), 1, 1)) == [0x7FF8000000000001]


def test_absence_survives_and_stays_apart_from_nan() -> None:
    values = np.array([[float(ABSENT), np.nan, 1.0]])
    assert bits(codec.decode_values(codec.encode_values(values), 1, 3)) == bits(values)
    assert bits(values)[0] != bits(values)[1]


@given(st.sets(st.integers(0, 2**53 - 1), min_size=1, max_size=100))
def test_steps_come_back(chosen: set[int]) -> None:
    steps = np.array(sorted(chosen), np.int64)
    stride, data = codec.encode_steps(steps)
    assert codec.decode_steps(int(steps[0]), stride, len(steps), data).tolist() == steps.tolist()


@given(st.integers(0, 2**40), st.integers(1, 2**12), st.integers(1, 100))
def test_even_steps_cost_nothing(first: int, stride: int, count: int) -> None:
    steps = first + stride * np.arange(count, dtype=np.int64)
    assert codec.encode_steps(steps) == (stride if count > 1 else 1, None)


@given(st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    packed = bytearray(codec.encode_values(np.arange(64, dtype=np.float64)[:, None] * 1.1))
    place = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[place // 8] ^= 1 << (place % 8)
    try:
        back = codec.decode_values(bytes(packed), 64, 1)
    except codec.CorruptData:
        return
    # zstd's frame header has a bit that decoders must ignore; nothing else may pass.
    assert bits(back) == bits(np.arange(64) * 1.1)


@given(st.data())
def test_a_cut_block_is_noticed(data: st.DataObject) -> None:
    packed = codec.encode_values(np.arange(64, dtype=np.float64)[:, None])
    kept = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(codec.CorruptData):
        codec.decode_values(packed[:kept], 64, 1)


def test_another_count_is_noticed_before_anything_is_allocated() -> None:
    with pytest.raises(codec.CorruptData, match="512 bytes where 8000000000000"):
        codec.decode_values(codec.encode_values(np.arange(64, dtype=np.float64)[:, None] + 1e-12), 10**12, 1)


def test_a_later_codec_is_refused_by_name() -> None:
    packed = codec.encode_values(np.ones((2, 1)))
    with pytest.raises(codec.CorruptData, match="ff01"):
        codec.decode_values(b"\xff" + packed[1:], 2, 1)
