"""What lists say about a metric: newest value, extent, extremes; chunks and tails together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.absent import is_absent
from gradiometer_server.store.pieces import Piece, extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest merged value of each scalar of a run (its latest attempt that has one), and the highest step."""

    last_step: int | None
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """A metric over all attempts, tails included; figures are of the merged series, or of the ranks if only they are.

    A step that is written again counts once, and what it was counts until that is flushed.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    num_points: int
    first_step: int | None
    last_step: int | None
    last: float | None
    min: float | None
    max: float | None
    num_nonfinite: int


def last_value(piece: Piece) -> float | None:
    """Value at the highest step of a scalar, None if it is absent; the tail wins."""
    if len(piece.steps_N) and (piece.row.last_step is None or piece.steps_N[-1] >= piece.row.last_step):
        return None if is_absent(piece.values_NW[-1])[0] else float(piece.values_NW[-1, 0])
    return piece.row.last


def metric_of(name: str, pieces: Sequence[Piece]) -> MetricRow:
    """One metric from the pieces of all its attempts and ranks, in order of launch."""
    merged = [piece for piece in pieces if piece.row.series.rank is None] or list(pieces)
    first, last = extent(merged)
    finite = [_finite_extremes(piece) for piece in merged]
    newest = [piece for piece in merged if piece.last_step is not None]
    is_scalar = merged[0].row.series.kind == "scalar"
    return MetricRow(
        name=name,
        kind=merged[0].row.series.kind,
        ranks=tuple(sorted({piece.row.series.rank for piece in pieces if piece.row.series.rank is not None})),
        num_points=sum(piece.num_points for piece in merged),
        first_step=first,
        last_step=last,
        last=last_value(newest[-1]) if newest and is_scalar else None,
        min=min((low for low, _ in finite if low is not None), default=None),
        max=max((high for _, high in finite if high is not None), default=None),
        num_nonfinite=sum(
            piece.row.num_nonfinite + _num_nonfinite(piece.values_NW[piece.num_known :]) for piece in merged
        ),
    )


def _finite_extremes(piece: Piece) -> tuple[float | None, float | None]:
    finite = piece.values_NW[np.isfinite(piece.values_NW)]
    lows = [x for x in (piece.row.min, float(finite.min()) if len(finite) else None) if x is not None]
    highs = [x for x in (piece.row.max, float(finite.max()) if len(finite) else None) if x is not None]
    return min(lows, default=None), max(highs, default=None)


def _num_nonfinite(values: NDArray[Any]) -> int:
    return int((~np.isfinite(values) & ~is_absent(values)).sum())
