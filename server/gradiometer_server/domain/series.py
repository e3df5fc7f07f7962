"""Series as values: identity, the part of one not yet in chunks, and the buckets that a chart draws.

Shape letters: N points, B buckets, W width of a series (1 for a scalar, number of layers for a layer statistic).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A stored series. `rank` None: merged over ranks. `attempt` is the ordinal, from 1."""

    run_key: int
    series_id: int
    attempt: int
    key: str
    rank: int | None
    kind: Literal["scalar", "layer"]
    width: int
    layout_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Points of a series that are folded but not yet in a chunk: steps int64 (N,), values (N, W).

    Steps may repeat or go back: the later entry wins, also over what the chunks hold.
    """

    steps_N: NDArray[np.int64]
    values_NW: NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Buckets of equal step width, aligned to multiples of it, empty ones left out.

    `first_step_B` is the first step that has a point in the bucket. Counts are of points: finite, nan, pos_inf,
    neg_inf; absent ones are in none of them. mean/min/max are over finite values, NaN where there are none.
    """

    width: int
    first_step_B: NDArray[np.int64]
    mean_BW: NDArray[np.float64]
    min_BW: NDArray[np.float64]
    max_BW: NDArray[np.float64]
    num_finite_BW: NDArray[np.int64]
    num_nan_BW: NDArray[np.int64]
    num_pos_inf_BW: NDArray[np.int64]
    num_neg_inf_BW: NDArray[np.int64]
