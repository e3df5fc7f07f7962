"""The one definition of the vector of mergeable partial statistics (`wire.STATISTICS`) of a gradient.

A *table* is a float64 array of shape (layers, 7), one row per parameter. A row whose `count` is 0 says that the
parameter had no gradient; its other entries mean nothing. A table of norms has only the columns `NORMS`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from gradiometer import wire

Floats = npt.NDArray[np.float64]

COUNT, SUM, SUM_SQUARES, MIN, MAX, NUM_ZEROS, NUM_NONFINITE = range(7)
WIDTH: Final = len(wire.STATISTICS)
NORMS: Final = tuple(wire.STATISTICS.index(name) for name in wire.NORM_STATISTICS)
_LINEAR: Final = ("sum", "min", "max")
assert wire.STATISTICS == ("count", "sum", "sum_squares", "min", "max", "num_zeros", "num_nonfinite")


def exact(values: Floats) -> Floats:
    """The definition: the row of one gradient whose elements are `values` (float64, any shape), shape (7,).

    Costs several passes and a float64 copy, so the capture uses it only where its cheap recipe has no answer (and
    the tests use it as the reference).
    """
    row = np.zeros(WIDTH)
    row[COUNT] = values.size
    if values.size == 0:
        return row
    # NaN and infinities are results here, not accidents.
    with np.errstate(all="ignore"):
        row[SUM] = values.sum()
        row[SUM_SQUARES] = np.square(values).sum()
    row[MIN] = values.min()
    row[MAX] = values.max()
    row[NUM_ZEROS] = values.size - np.count_nonzero(values)
    row[NUM_NONFINITE] = values.size - np.count_nonzero(np.isfinite(values))
    return row


def with_implicit_zeros(row_s: Floats, num_elements: int) -> Floats:
    """The row of a sparse gradient of `num_elements`, from the row `row_s` of its stored values."""
    num_implicit = num_elements - int(row_s[COUNT])
    row = row_s.copy()
    row[COUNT] = num_elements
    row[NUM_ZEROS] += num_implicit
    if num_implicit:
        # np.minimum hands a NaN on, as a pass over all elements would.
        row[MIN] = np.minimum(row[MIN], 0.0)
        row[MAX] = np.maximum(row[MAX], 0.0)
    return row


def unscale(table: Floats, scale: float, statistics: tuple[str, ...] = wire.STATISTICS) -> Floats:
    """The table of gradients divided by the loss scale, from the table of gradients still multiplied by it.

    sum, min and max are linear in the gradient, the sum of squares is quadratic; the counts do not change, unless the
    scale is 0 or NaN: then nothing finite is left.
    """
    unscaled = table.copy()
    if scale == 0.0 or scale != scale:
        unscaled[:, statistics.index("num_nonfinite")] = unscaled[:, statistics.index("count")]
    # A scale of 0 or a statistic that overflowed gives Inf or NaN, which is then the truth about the gradient.
    with np.errstate(all="ignore"):
        for column, name in enumerate(statistics):
            if name in _LINEAR:
                unscaled[:, column] /= scale
            elif name == "sum_squares":
                unscaled[:, column] = unscaled[:, column] / scale / scale
    return unscaled
