"""All layer statistics at one step, from the newest points of their series.

Norms are measured in every step, the other statistics perhaps only now and then; each is shown as it was last known.

Shape letters: N points, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.absent import ABSENT, is_absent
from gradiometer_server.domain.folded import Layout
from gradiometer_server.domain.names import LAYER_PREFIX
from gradiometer_server.errors import NotFound
from gradiometer_server.store.pieces import Fetched, Piece, points_of
from gradiometer_server.summaries.columns import common_layout, places, spread_values

_EVERY_STEP: Final = ("norm", "rms", "num_nonfinite")
"""Statistics that every report of layers has: their absence says something, so no older value stands in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersAt:
    """Layer statistics as they are known at a step.

    Attributes:
        step: the last step with a report of layers.
        values: by statistic, float64 (L,); ABSENT where a layer had no gradient, or none of it was measured.
        measured_at: by statistic, the step that its values are of: `step` or an earlier one; None: never measured.
    """

    step: int
    layout: Layout
    values: Mapping[str, NDArray[np.float64]]
    measured_at: Mapping[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Points:
    """The last points of one series: steps (N,), values (N, L of its own layout)."""

    name: str
    piece: Piece
    steps_N: NDArray[np.int64]
    values_NL: NDArray[np.float64]


def layers_at(fetched: Sequence[Fetched], layouts: Mapping[int, Layout], limit: int) -> LayersAt:
    """See `LayersAt`; `fetched` holds for each layer series the chunk with its last step <= `limit`.

    Raises:
        NotFound: there is no point at all.
    """
    found = [points for one in fetched if len((points := _points(one)).steps_N)]
    if not found:
        raise NotFound("layer statistics at or before step", str(limit))
    at = max(int(points.steps_N[-1]) for points in found)
    common = common_of([points.piece for points in found if points.steps_N[-1] == at], layouts)
    by_name: dict[str, list[_Points]] = {}
    for points in found:
        by_name.setdefault(points.name, []).append(points)
    values: dict[str, NDArray[np.float64]] = {}
    measured_at: dict[str, int | None] = {}
    for name, some in by_name.items():
        step = at if name in _EVERY_STEP else max((_last_measured(one) for one in some), default=-1)
        values[name] = _row_at(step, some, layouts, common)
        measured_at[name] = step if step >= 0 else None
    return LayersAt(step=at, layout=common, values=values, measured_at=measured_at)


def _points(fetched: Fetched) -> _Points:
    steps_N, values_NL = points_of(fetched)
    name = fetched.piece.row.series.key.removeprefix(LAYER_PREFIX)
    return _Points(name=name, piece=fetched.piece, steps_N=steps_N, values_NL=values_NL)


def _last_measured(points: _Points) -> int:
    """The last step with a value for any layer; -1 if there is none in what was fetched."""
    for at in range(len(points.steps_N) - 1, -1, -1):
        if not is_absent(points.values_NL[at]).all():
            return int(points.steps_N[at])
    return -1


def _row_at(
    step: int, some: Sequence[_Points], layouts: Mapping[int, Layout], common: Layout
) -> NDArray[np.float64]:
    """Values (L,) at exactly `step`, from all series of the statistic that have one there."""
    row_L = np.full(len(common.names), ABSENT)
    for points in some:
        at = int(np.searchsorted(points.steps_N, step))
        if at < len(points.steps_N) and points.steps_N[at] == step:
            to = places(layouts[layout_id_of(points.piece)], common)
            moved_L = spread_values(points.values_NL[at], to, len(common.names))
            row_L = np.where(is_absent(moved_L), row_L, moved_L)
    return row_L


def layout_id_of(piece: Piece) -> int:
    """The layout of a layer series."""
    layout_id = piece.row.series.layout_id
    if layout_id is None:
        raise ValueError(f"layer series {piece.row.series.series_id} has no layout")
    return layout_id


def common_of(pieces: Sequence[Piece], layouts: Mapping[int, Layout]) -> Layout:
    """Layout of the newest attempt that has points; one that grew within the attempt keeps all its layers."""
    filled = [piece for piece in pieces if piece.first_step is not None] or list(pieces)
    newest = filled[-1].row.series.attempt
    ids = sorted({layout_id_of(piece) for piece in filled if piece.row.series.attempt == newest})
    return common_layout([layouts[layout_id] for layout_id in ids])
