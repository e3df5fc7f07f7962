"""The debiased exponential moving average that charts call smoothing.

Shape letters: N points; K blocks of B points.
"""

from __future__ import annotations

import itertools
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_WEIGHT: Final = 0.99999
_NEGLIGIBLE_LOG: Final = -192 * math.log(2.0)
"""2**-60 no longer changes a float64 sum of values of one size, and 2**-192 none in which one is the largest float32."""
_BLOCK_LOG: Final = 500 * math.log(2.0)
_MAX_BLOCK: Final = 1024


def debiased_ema(values_N: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
    """Exponential moving average of the finite values, in order; NaN where a value is not finite (it is skipped).

    With w = `weight` in 0..`MAX_WEIGHT` and y_1..y_n the finite values so far::

        m_n = w * m_(n-1) + (1 - w) * y_n,   m_0 = 0
        s_n = m_n / (1 - w**n)

    so that s_1 = y_1, and the start is not drawn towards zero. The recursion is TensorBoard's smoothing slider
    (`line-chart` of its scalars page); the division is the bias correction of Kingma and Ba, "Adam: A Method for Stochastic
    Optimization" (2015), section 3.

    Inside a block m_n is the sum of (1 - w) * w**j * y_(n-j); sums over 1, 2, 4, ... terms are built from each other, and
    each block adds what the one before it ended with. So no weight ever grows, nothing overflows and no value is
    forgotten before the recursion would forget it.
    """
    smoothed_N = np.full(len(values_N), np.nan)
    finite_N = np.isfinite(values_N)
    known = values_N[finite_N]
    if weight <= 0.0 or len(known) == 0:
        smoothed_N[finite_N] = known
        return smoothed_N
    log_weight = math.log(weight)
    sums = _recursion((1.0 - weight) * known, log_weight)
    share = -np.expm1(np.arange(1, len(sums) + 1) * log_weight)
    with np.errstate(over="ignore"):
        # Rounding may step over the largest value of all, which no average can exceed.
        smoothed_N[finite_N] = np.clip(sums / share, known.min(), known.max())
    return smoothed_N


def _recursion(values_N: NDArray[np.float64], log_weight: float) -> NDArray[np.float64]:
    """m_n = w * m_(n-1) + values_n for all n, from 0."""
    # A block is short enough that the weight of its first value at its end is an ordinary float.
    longest = min(max(1.0, -_BLOCK_LOG / log_weight), _MAX_BLOCK)
    size = 1 << int(math.log2(longest))
    num_blocks = -(-len(values_N) // size)
    sums_KB = np.zeros((num_blocks, size))
    sums_KB.reshape(-1)[: len(values_N)] = values_N
    shift = 1
    while shift < size:
        sums_KB[:, shift:] += math.exp(shift * log_weight) * sums_KB[:, :-shift]
        shift *= 2
    weight_B = math.exp(size * log_weight)
    ends = itertools.accumulate(sums_KB[:-1, -1].tolist(), lambda before, own: before * weight_B + own)
    sums_KB[1:] += np.fromiter(ends, np.float64)[:, None] * np.exp(np.arange(1, size + 1) * log_weight)
    return sums_KB.reshape(-1)[: len(values_N)]


def lead_in(weight: float) -> int:
    """How many finite points before a range still matter to the average inside it.

    A value before them is left out. To be missed it would have to be more than 2**132 times as large as those in the range.
    """
    return 0 if weight <= 0.0 else math.ceil(_NEGLIGIBLE_LOG / math.log(weight)) + 1
