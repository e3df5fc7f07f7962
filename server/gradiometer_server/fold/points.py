"""From folded values to points of series and to the live feed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain import names
from gradiometer_server.domain.folded import Folded, FoldedLayers, FoldedScalars
from gradiometer_server.domain.live import PointsUpdate
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


def points_of(items: Sequence[Folded], times: Mapping[int, Mapping[int, float]]) -> list[Point]:
    """Everything to be stored, in order; `times`: by attempt and step, for the series of times."""
    points: list[Point] = []
    for item in items:
        if isinstance(item, FoldedScalars):
            points += _scalar_points(item)
        elif isinstance(item, FoldedLayers):
            points += _layer_points(item)
    for attempt, by_step in times.items():
        name = SeriesName(attempt, names.TIME)
        points += [Point(name, step, time_s) for step, time_s in by_step.items()]
    return points


def _scalar_points(item: FoldedScalars) -> list[Point]:
    attempt, step = item.attempt, item.step
    points = [Point(SeriesName(attempt, key), step, value) for key, value in item.values.items()]
    for key, by_rank in item.by_rank.items():
        points += [Point(SeriesName(attempt, key, rank), step, value) for rank, value in by_rank.items()]
    return points


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
    if not series and layers_step is None:
        return None
    return PointsUpdate(run_id=run_id, series=series, layers_step=layers_step)
