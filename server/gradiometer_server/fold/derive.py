"""Layer statistics that people read, from the partial statistics that ranks merge. Pure.

Shape letters: L layers, P partial statistics (`gradiometer.wire.STATISTICS`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer.wire import STATISTICS
from gradiometer_server.domain import names
from gradiometer_server.domain.absent import ABSENT
from gradiometer_server.domain.folded import LAYER_STATISTICS

COUNT, SUM, SUM_SQUARES, MIN, MAX, NUM_ZEROS, NUM_NONFINITE = range(len(STATISTICS))
"""Columns of a partial, in wire order."""
ALL: Final = frozenset(range(len(STATISTICS)))
_NEEDS: Final = {
    "norm": (SUM_SQUARES,),
    "rms": (SUM_SQUARES,),
    "mean": (SUM,),
    "std": (SUM, SUM_SQUARES),
    "abs_max": (MIN, MAX),
    "zero_fraction": (NUM_ZEROS,),
    "num_nonfinite": (NUM_NONFINITE,),
}
"""Columns, beside the count, that a derived statistic is made of."""

FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Which columns of the merged partials of a step mean something: ranks may read more of it or less.

    Attributes:
        by_some: columns that at least one writer measured.
        missing_MP: where a writer that has a part of the layer did not measure the column; None: nowhere.
    """

    by_some: frozenset[int] = ALL
    missing_MP: NDArray[np.bool_] | None = None

    def lacks(self, columns: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """Layers (M,) for which not all of `columns` mean something; None: no layer."""
        if self.missing_MP is None:
            return None
        lacking_M: NDArray[np.bool_] = np.any(self.missing_MP[:, columns], axis=1)
        return lacking_M


EVERYTHING: Final = Measured()


def derive_layers(
    partials_LP: NDArray[np.float64], measured: Measured = EVERYTHING
) -> dict[str, NDArray[np.float64]]:
    """Statistics of each layer: `LAYER_STATISTICS` by name, float64 (L,), `ABSENT` where its count is 0.

    `ABSENT` as well where something that the statistic needs was not measured, and left out altogether if no writer
    measured it.

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
        # Inf - Inf is NaN, but no element was: the squares are beyond float64, and the deviation with them.
        overflowed_L = np.isposinf(mean_square_L) & (partials_LP[:, NUM_NONFINITE] == 0)
        derived["std"][overflowed_L] = np.inf
    kept = [name for name in LAYER_STATISTICS if measured.by_some.issuperset(_NEEDS[name])]
    for name in kept:
        lacking_L = measured.lacks(_NEEDS[name])
        derived[name][~present_L if lacking_L is None else ~present_L | lacking_L] = ABSENT
    return {name: derived[name] for name in kept}


def derive_global(partials_LP: NDArray[np.float64], measured: Measured = EVERYTHING) -> dict[str, float]:
    """The whole gradient as scalars: norm, abs-max, non-finite elements, fraction of zeros.

    Empty when no layer had a gradient: there is no norm then, and 0 would be a lie. Without those that were not
    measured in all layers: a maximum over some of them would be another quantity.
    """
    present_LP = partials_LP[partials_LP[:, COUNT] > 0]
    if present_LP.shape[0] == 0:
        return {}
    with np.errstate(all="ignore"):
        totals = {names.GRAD_NORM: float(np.sqrt(present_LP[:, SUM_SQUARES].sum()))}
        if _is_whole(measured, (MIN, MAX)):
            totals[names.GRAD_ABS_MAX] = float(np.abs(present_LP[:, (MIN, MAX)]).max())
        totals[names.GRAD_NUM_NONFINITE] = float(present_LP[:, NUM_NONFINITE].sum())
        if _is_whole(measured, (NUM_ZEROS,)):
            zeros, count = present_LP[:, NUM_ZEROS].sum(), present_LP[:, COUNT].sum()
            totals[names.GRAD_ZERO_FRACTION] = float(zeros / count)
        return totals


def _is_whole(measured: Measured, columns: tuple[int, ...]) -> bool:
    """Whether every layer that had a gradient was measured in these columns."""
    lacking = measured.lacks(columns)
    return measured.by_some.issuperset(columns) and (lacking is None or not bool(lacking.any()))


def to_storage(values_L: NDArray[np.float64]) -> NDArray[np.float32] | NDArray[np.float64]:
    """Layer values as they are stored: float32, unless a finite value would become infinite; then float64."""
    with np.errstate(all="ignore"):
        narrow_L = values_L.astype(np.float32)
    if np.isinf(narrow_L).any() and (np.isinf(narrow_L) & np.isfinite(values_L)).any():
        return values_L
    return narrow_L
