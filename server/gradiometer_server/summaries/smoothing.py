"""The debiased exponential moving average that charts call smoothing.

Shape letters: N points.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_WEIGHT: Final = 0.99999
_NEGLIGIBLE_LOG: Final = -60 * math.log(2.0)
"""A weight below 2**-60 no longer changes a float64 sum."""


def debiased_ema(values_N: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
    """Exponential moving average of the finite values, in order; NaN where a value is not finite (it is skipped).

    With w = `weight` in 0..`MAX_WEIGHT` and y_1..y_n the finite values so far::

        m_n = w * m_(n-1) + (1 - w) * y_n,   m_0 = 0
        s_n = m_n / (1 - w**n)

    so that s_1 = y_1, and the start is not drawn towards zero. The recursion is TensorBoard's smoothing slider
    (`line-chart` of its scalars page); the division is the bias correction of Kingma and Ba, "Adam: A Method for Stochastic
    Optimization" (2015), section 3.

    m_n is the sum of (1 - w) * w**j * y_(n-j) over j; sums over 1, 2, 4, ... terms are built from each other, so that no
    weight ever grows and nothing overflows: log2 of the terms that matter many passes over the array.
    """
    smoothed_N = np.full(len(values_N), np.nan)
    finite_N = np.isfinite(values_N)
    known = values_N[finite_N]
    if weight <= 0.0 or len(known) == 0:
        smoothed_N[finite_N] = known
        return smoothed_N
    log_weight = math.log(weight)
    sums = (1.0 - weight) * known
    shift = 1
    while shift < len(sums) and shift * log_weight > _NEGLIGIBLE_LOG:
        sums[shift:] += math.exp(shift * log_weight) * sums[:-shift]
        shift *= 2
    share = -np.expm1(np.arange(1, len(sums) + 1) * log_weight)
    with np.errstate(over="ignore"):
        # Rounding may step over the largest value of all, which no average can exceed.
        smoothed_N[finite_N] = np.clip(sums / share, known.min(), known.max())
    return smoothed_N


def lead_in(weight: float) -> int:
    """How many finite points before a range still matter to the average inside it."""
    return 0 if weight <= 0.0 else math.ceil(_NEGLIGIBLE_LOG / math.log(weight)) + 1
