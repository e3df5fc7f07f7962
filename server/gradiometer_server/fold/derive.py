"""Layer statistics that people read, from the partial statistics that ranks merge. Pure.

Shape letters: L layers, P partial statistics (`gradiometer.wire.STATISTICS`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer.wire import STATISTICS
from gradiometer_server.domain import names
from gradiometer_server.domain.absent import ABSENT
from gradiometer_server.domain.folded import LAYER_STATISTICS

COUNT, SUM, SUM_SQUARES, MIN, MAX, NUM_ZEROS, NUM_NONFINITE = range(len(STATISTICS))
"""Columns of a partial, in wire order."""

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


def derive_layers(partials_LP: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Statistics of each layer: `LAYER_STATISTICS` by name, float64 (L,), `ABSENT` where its count is 0.

    norm = sqrt(sum of squares); rms = sqrt(sum of squares / count); mean = sum / count; std is the population
    deviation sqrt(E[x^2] - E[x]^2), clamped at 0 because the difference of two close numbers can dip below it;
    abs_max = max(|min|, |max|). NaN and infinities pass through as IEEE arithmetic has it.
    """
    count_L = partials_LP[:, COUNT]
    present_L = count_L > 0
    with np.errstate(all="ignore"):
        mean_L = partials_LP[:, SUM] / count_L
        mean_square_L = partials_LP[:, SUM_SQUARES] / count_L
        derived = {
            "norm": np.sqrt(partials_LP[:, SUM_SQUARES]),
            "rms": np.sqrt(mean_square_L),
            "mean": mean_L,
            "std": np.sqrt(np.maximum(mean_square_L - mean_L * mean_L, 0.0)),
            "abs_max": np.maximum(np.abs(partials_LP[:, MIN]), np.abs(partials_LP[:, MAX])),
            "zero_fraction": partials_LP[:, NUM_ZEROS] / count_L,
            "num_nonfinite": partials_LP[:, NUM_NONFINITE].copy(),
        }
    if not present_L.all():
        for values_L in derived.values():
            values_L[~present_L] = ABSENT
    return {name: derived[name] for name in LAYER_STATISTICS}


def derive_global(partials_LP: NDArray[np.float64]) -> dict[str, float]:
    """The whole gradient as scalars: norm, abs-max, non-finite elements, fraction of zeros.

    Empty when no layer had a gradient: there is no norm then, and 0 would be a lie.
    """
    present_LP = partials_LP[partials_LP[:, COUNT] > 0]
    if present_LP.shape[0] == 0:
        return {}
    with np.errstate(all="ignore"):
        extremes = np.abs(present_LP[:, (MIN, MAX)])
        return {
            names.GRAD_NORM: float(np.sqrt(present_LP[:, SUM_SQUARES].sum())),
            names.GRAD_ABS_MAX: float(extremes.max()),
            names.GRAD_NUM_NONFINITE: float(present_LP[:, NUM_NONFINITE].sum()),
            names.GRAD_ZERO_FRACTION: float(present_LP[:, NUM_ZEROS].sum() / present_LP[:, COUNT].sum()),
        }


def to_storage(values_L: NDArray[np.float64]) -> NDArray[np.float32] | NDArray[np.float64]:
    """Layer values as they are stored: float32, unless a finite value would become infinite; then float64."""
    with np.errstate(all="ignore"):
        narrow_L = values_L.astype(np.float32)
    if np.isinf(narrow_L).any() and (np.isinf(narrow_L) & np.isfinite(values_L)).any():
        return values_L
    return narrow_L
