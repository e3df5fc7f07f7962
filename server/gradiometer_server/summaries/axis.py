"""Buckets over an x axis of floats: times, tokens, any metric.

A bucket is [i * width, (i + 1) * width) for a whole i, with a power of two as width: as a run grows, edges stay where they
are or every second one goes. Bucket numbers are floats, which hold them exactly.

Shape letters: N points, B buckets, M known values of x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.series import Buckets
from gradiometer_server.summaries import buckets

LEAST_BUCKETS: Final = 4
"""Fewer cannot hold every range: 0 is always an edge, and the widest bucket is 2**1023 wide."""
_MAX_EXPONENT: Final = 1023
_MIN_EXPONENT: Final = -1074


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisBuckets:
    """Buckets over x. `place_B`: their numbers; `x_B`: x of the earliest step in each. `width` 0: points as they are."""

    width: float
    place_B: NDArray[np.float64]
    x_B: NDArray[np.float64]
    buckets: Buckets


def axis_width(low: float, high: float, most: int) -> float:
    """The smallest power of two whose aligned buckets over low..high number at most `most` (>= `LEAST_BUCKETS`)."""
    if most < LEAST_BUCKETS:
        raise ValueError(f"an axis of floats needs at least {LEAST_BUCKETS} buckets, not {most}")
    half_span = high / 2 - low / 2
    exponent = _MIN_EXPONENT
    if half_span > 0:
        exponent = max(_MIN_EXPONENT, math.frexp(half_span)[1] + 1 - most.bit_length() - 1)
    elif high != 0:
        exponent = max(_MIN_EXPONENT, math.frexp(high)[1] - 53)
    ends = np.array([low, high])
    while exponent < _MAX_EXPONENT:
        first, last = places(ends, math.ldexp(1.0, exponent)).tolist()
        if last - first < most:
            break
        exponent += 1
    return math.ldexp(1.0, exponent)


def places(x_N: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    """Number of the bucket that each x falls into; `width` is a power of two."""
    exponent = math.frexp(width)[1] - 1
    scaled_N = np.floor(np.ldexp(x_N, -exponent))
    # A negative x far smaller than a bucket is rounded to zero by the scaling, and still lies below it.
    return np.where((x_N < 0) & (scaled_N == 0), -1.0, scaled_N)


def carried(
    steps_N: NDArray[np.int64], known_M: NDArray[np.int64], x_M: NDArray[np.float64]
) -> NDArray[np.float64]:
    """X of each step: what was known at it or last before it; before anything was known, the first that became known.

    Args:
        known_M: rising steps (M >= 1) at which x is known.
        x_M: finite.
    """
    at_N = np.searchsorted(known_M, steps_N, side="right") - 1
    return x_M[np.maximum(at_N, 0)]


def by_axis(
    steps_N: NDArray[np.int64], values_N1: NDArray[np.float64], x_N: NDArray[np.float64], width: float
) -> AxisBuckets:
    """Points with rising steps as buckets of `width` in x; 0: every point by itself."""
    if width == 0:
        every = np.arange(len(steps_N))
        found = buckets.reduce_to_buckets(steps_N, values_N1, 1, every)
        return AxisBuckets(width=0.0, place_B=x_N, x_B=x_N, buckets=found)
    place_N, order = _in_order(x_N, width)
    if order is not None:
        steps_N, values_N1, x_N = steps_N[order], values_N1[order], x_N[order]
    starts = _starts(place_N)
    found = buckets.reduce_to_buckets(steps_N, values_N1, 1, starts)
    return AxisBuckets(width=width, place_B=place_N[starts], x_B=x_N[starts], buckets=found)


def rows_by_axis(rows: Buckets, x_N: NDArray[np.float64], width: float) -> AxisBuckets:
    """As `by_axis`, of finer buckets by rising step instead of points."""
    if width == 0:
        return AxisBuckets(width=0.0, place_B=x_N, x_B=x_N, buckets=rows)
    place_N, order = _in_order(x_N, width)
    if order is not None:
        rows, x_N = buckets.reordered(rows, order), x_N[order]
    starts = _starts(place_N)
    found = buckets.merge_rows(rows, 1, starts)
    return AxisBuckets(width=width, place_B=place_N[starts], x_B=x_N[starts], buckets=found)


def _in_order(x_N: NDArray[np.float64], width: float) -> tuple[NDArray[np.float64], NDArray[np.intp] | None]:
    """Bucket numbers by rising number, and the order (None: as they came) that makes them so."""
    place_N = places(x_N, width)
    if (place_N[1:] >= place_N[:-1]).all():
        return place_N, None
    order = np.argsort(place_N, kind="stable")
    return place_N[order], order


def _starts(place_N: NDArray[np.float64]) -> NDArray[np.intp]:
    if len(place_N) == 0:
        return np.empty(0, np.intp)
    return np.concatenate([np.zeros(1, np.intp), np.flatnonzero(place_N[1:] != place_N[:-1]) + 1])
