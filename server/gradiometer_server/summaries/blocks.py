"""A chunk as a value: encoded from points, decoded to points, checked against its own summary. No I/O.

Shape letters: N points, W width of a series.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.series import Buckets
from gradiometer_server.summaries import buckets, codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The columns of one chunk row, less its key. `min` and `max`: over finite values of all columns, or None.

    `data` is empty and `steps` is None once the points were dropped to save space; the summary stays.
    """

    step0: int
    step1: int
    n: int
    stride: int
    dtype: str
    summary_width: int
    min: float | None
    max: float | None
    num_nonfinite: int
    summary: bytes
    steps: bytes | None
    data: bytes

    @property
    def is_thinned(self) -> bool:
        """Whether only the summary is left."""
        return not self.data


def encode_points(steps_N: NDArray[np.int64], values_NW: NDArray[np.float64]) -> Block:
    """Encode points with strictly rising steps as one block. The same points always give the same bytes."""
    small = codec.narrow(values_NW)
    windows = buckets.bucketise(steps_N, values_NW, buckets.window_width(steps_N))
    stride, packed_steps = codec.encode_steps(steps_N)
    low, high = extremes(windows)
    return Block(
        step0=int(steps_N[0]),
        step1=int(steps_N[-1]),
        n=len(steps_N),
        stride=stride,
        dtype="f4" if small.dtype == np.float32 else "f8",
        summary_width=windows.width,
        min=low,
        max=high,
        num_nonfinite=num_nonfinite(windows),
        summary=buckets.encode_summary(windows, narrow=small.dtype == np.float32),
        steps=packed_steps,
        data=codec.pack(small),
    )


def decode_points(block: Block, width: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Steps (N,) and values (N, W) of a block. Raises `CorruptData`."""
    steps = codec.decode_steps(block.step0, block.stride, block.n, block.steps, last=block.step1)
    return steps, codec.decode_values(block.data, block.n, width)


def extremes(windows: Buckets) -> tuple[float | None, float | None]:
    """Smallest and largest finite value of all buckets and columns; (None, None) if there is none."""
    if not windows.num_finite_BW.any():
        return None, None
    return float(np.nanmin(windows.min_BW)), float(np.nanmax(windows.max_BW))


def num_nonfinite(windows: Buckets) -> int:
    """NaN and infinities of all buckets and columns together."""
    return int(windows.num_nan_BW.sum() + windows.num_pos_inf_BW.sum() + windows.num_neg_inf_BW.sum())


def problem_of(block: Block, width: int) -> str | None:
    """What is wrong with a stored block, or None: it must decode, and encode to the same bytes again.

    Of a thinned block only the summary and the row can be held against each other.
    """
    if block.summary_width < 1 or block.summary_width & (block.summary_width - 1):
        return f"its summary's windows are {block.summary_width} steps wide, which is no power of two"
    try:
        windows = buckets.decode_summaries(
            [block.summary], width=block.summary_width, columns=width, narrow=block.dtype == "f4"
        )
        if block.is_thinned:
            return _row_problem(block, windows)
        steps, values = decode_points(block, width)
    except codec.CorruptData as error:
        return error.message
    if len(steps) > 1 and not (steps[1:] > steps[:-1]).all():
        return "its steps do not rise"
    return _summary_problem(block, windows, buckets.bucketise(steps, values, block.summary_width))


def _summary_problem(block: Block, stored: Buckets, computed: Buckets) -> str | None:
    # Extremes, counts and steps must agree exactly; a mean may differ in its last digits between numpy versions.
    for name in (
        "first_step_B",
        "min_BW",
        "max_BW",
        "num_finite_BW",
        "num_nan_BW",
        "num_pos_inf_BW",
        "num_neg_inf_BW",
    ):
        if not np.array_equal(getattr(stored, name), getattr(computed, name), equal_nan=True):
            return f"its summary differs from its values in {name.rsplit('_', 1)[0]}"
    if not np.allclose(stored.mean_BW, computed.mean_BW, rtol=1e-9, atol=0, equal_nan=True):
        return "its summary differs from its values in mean"
    return _row_problem(block, computed)


def _row_problem(block: Block, windows: Buckets) -> str | None:
    if (block.min, block.max) != extremes(windows) or block.num_nonfinite != num_nonfinite(windows):
        return "its row's min, max or non-finite count differ from its values"
    return None
