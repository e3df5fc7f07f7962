"""Layers over several layouts: one list of names, and columns moved to their places in it.

Shape letters: B buckets, L layers of the common layout, W columns of a series.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.absent import ABSENT
from gradiometer_server.domain.folded import Layout
from gradiometer_server.domain.series import Buckets


def common_layout(layouts: Sequence[Layout]) -> Layout:
    """The last layout, with the layers that only earlier ones have appended to it."""
    newest = layouts[-1]
    numels = dict(zip(newest.names, newest.numels, strict=True))
    for layout in layouts[:-1]:
        for name, numel in zip(layout.names, layout.numels, strict=True):
            numels.setdefault(name, numel)
    if len(numels) == len(newest.names):
        return newest
    return Layout(layout_id=newest.layout_id, names=tuple(numels), numels=tuple(numels.values()))


def places(own: Layout, common: Layout) -> NDArray[np.intp]:
    """Place of each of `own`'s layers in `common` (W,); -1 where it has none."""
    index = {name: place for place, name in enumerate(common.names)}
    return np.fromiter((index.get(name, -1) for name in own.names), np.intp, len(own.names))


def spread(buckets: Buckets, places_W: NDArray[np.intp], num_layers: int) -> Buckets:
    """The buckets with their columns at their places; layers that the series does not have count nothing."""
    if len(places_W) == num_layers and (places_W == np.arange(num_layers)).all():
        return buckets

    def real(values_BW: NDArray[np.float64]) -> NDArray[np.float64]:
        moved: NDArray[np.float64] = _spread_rows(values_BW, places_W, num_layers, np.nan)
        return moved

    def count(values_BW: NDArray[np.int64]) -> NDArray[np.int64]:
        moved: NDArray[np.int64] = _spread_rows(values_BW, places_W, num_layers, 0)
        return moved

    return Buckets(
        width=buckets.width,
        first_step_B=buckets.first_step_B,
        mean_BW=real(buckets.mean_BW),
        min_BW=real(buckets.min_BW),
        max_BW=real(buckets.max_BW),
        num_finite_BW=count(buckets.num_finite_BW),
        num_nan_BW=count(buckets.num_nan_BW),
        num_pos_inf_BW=count(buckets.num_pos_inf_BW),
        num_neg_inf_BW=count(buckets.num_neg_inf_BW),
    )


def spread_values(
    values_W: NDArray[np.float64], places_W: NDArray[np.intp], num_layers: int
) -> NDArray[np.float64]:
    """One row of values at their places (L,); ABSENT elsewhere."""
    moved_L: NDArray[np.float64] = _spread_rows(values_W[None], places_W, num_layers, ABSENT)[0]
    return moved_L


def _spread_rows(
    values_BW: NDArray[Any], places_W: NDArray[np.intp], num_layers: int, fill: Any
) -> NDArray[Any]:
    result_BL = np.full((len(values_BW), num_layers), fill, values_BW.dtype)
    known = places_W >= 0
    result_BL[:, places_W[known]] = values_BW[:, known]
    return result_BL
