"""From folded values to points of series and to the live feed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain import names
from gradiometer_server.domain.folded import Folded, FoldedBlock, FoldedLayers, FoldedScalars
from gradiometer_server.domain.live import ManyPoints, PointsUpdate
from gradiometer_server.fold.derive import to_storage


class SeriesName(NamedTuple):
    """Identity of a series within a run. `width` and `layout_id` say what a layer statistic is of."""

    attempt: int
    key: str
    rank: int | None = None
    layout_id: int | None = None
    width: int = 1


class Point(NamedTuple):
    """One step of one series: a float, or values of shape (W,)."""

    name: SeriesName
    step: int
    values: NDArray[np.floating[Any]] | float


class Points(NamedTuple):
    """Many steps of one scalar, rising: steps and values of shape (N,)."""

    name: SeriesName
    steps_N: NDArray[np.int64]
    values_N: NDArray[np.float64]


def points_of(items: Sequence[Folded], times: Mapping[int, Mapping[int, float]]) -> list[Point | Points]:
    """Everything to be stored, in order; `times`: by attempt and step, for the series of times."""
    points: list[Point | Points] = []
    for item in items:
        if isinstance(item, FoldedScalars):
            points += _scalar_points(item)
        elif isinstance(item, FoldedLayers):
            points += _layer_points(item)
        elif isinstance(item, FoldedBlock):
            points += _block_points(item)
    for attempt, by_step in times.items():
        steps_N = np.fromiter(by_step.keys(), np.int64, len(by_step))
        times_N = np.fromiter(by_step.values(), np.float64, len(by_step))
        points.append(Points(SeriesName(attempt, names.TIME), steps_N, times_N))
    return points


def _scalar_points(item: FoldedScalars) -> list[Point]:
    attempt, step = item.attempt, item.step
    points = [Point(SeriesName(attempt, key), step, value) for key, value in item.values.items()]
    for key, by_rank in item.by_rank.items():
        points += [Point(SeriesName(attempt, key, rank), step, value) for rank, value in by_rank.items()]
    return points


def _block_points(item: FoldedBlock) -> list[Points]:
    columns = zip(item.names, item.values_SC.T, strict=True)
    return [Points(SeriesName(item.attempt, key), item.steps_S, column_S) for key, column_S in columns]


def _layer_points(item: FoldedLayers) -> list[Point]:
    layout = item.layout
    return [
        Point(
            SeriesName(
                item.attempt, names.LAYER_PREFIX + statistic, None, layout.layout_id, len(layout.names)
            ),
            item.step,
            to_storage(values_L),
        )
        for statistic, values_L in item.statistics.items()
    ]


def live_points(run_id: str, items: Sequence[Folded]) -> PointsUpdate | None:
    """The merged points among `items`, as browsers get them; None if there are none."""
    series: dict[str, list[tuple[int, float]]] = {}
    layers_step: int | None = None
    for item in items:
        if isinstance(item, FoldedScalars):
            for key, value in item.values.items():
                series.setdefault(key, []).append((item.step, value))
        elif isinstance(item, FoldedLayers):
            layers_step = item.step if layers_step is None else max(layers_step, item.step)
    blocks = [item for item in items if isinstance(item, FoldedBlock)]
    if not series and layers_step is None and not blocks:
        return None
    return PointsUpdate(run_id=run_id, series=_with_blocks(series, blocks), layers_step=layers_step)


def _with_blocks(
    series: Mapping[str, Sequence[tuple[int, float]]], blocks: Sequence[FoldedBlock]
) -> Mapping[str, Sequence[tuple[int, float]]]:
    parts: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = {}
    for block in blocks:
        for key, column_S in zip(block.names, block.values_SC.T, strict=True):
            parts.setdefault(key, []).append((block.steps_S, column_S))
    many = {
        key: ManyPoints(np.concatenate([one[0] for one in found]), np.concatenate([one[1] for one in found]))
        for key, found in parts.items()
    }
    # A metric that comes both ways in one batch is rare, and put together the slow way.
    return {**series, **{key: [*series[key], *some] if key in series else some for key, some in many.items()}}
