"""What REST reads about series and layers. Every method blocks; call it in a thread.

Shape letters: B buckets, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from gradiometer_server.api import arrow
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.views import Json
from gradiometer_server.domain.jsonable import float_to_json, floats_to_json
from gradiometer_server.domain.series import Buckets
from gradiometer_server.errors import NotFound
from gradiometer_server.store.query import MetricRow, SeriesReader

Reduce = Literal["max", "min", "mean"]
NO_SECTION = "other"


class SeriesReads:
    """Reads of series in public form. Thread-safe."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    @property
    def _series(self) -> SeriesReader:
        return self._reads.series

    def metrics(self, run_id: str) -> Json:
        """All metrics of a run. Raises `NotFound`."""
        return {"metrics": [_metric_view(row) for row in self._series.metrics(self._reads.key(run_id))]}

    def layers(
        self, run_id: str, statistic: str, first: int | None, last: int | None, columns: int, reduce: Reduce
    ) -> LayerCells:
        """The heat map of one statistic. Raises `NotFound` (the run), `InvalidRequest`."""
        key = self._reads.key(run_id)
        try:
            layout, found, begin, end = self._series.layers_of(key, statistic, first, last, columns)
        except NotFound:
            return LayerCells(statistic=statistic, reduce=reduce, layers=())
        return LayerCells(
            statistic=statistic,
            reduce=reduce,
            layers=layout.names,
            found=found,
            first_step=begin,
            last_step=end,
        )

    def flow(self, run_id: str, step: int | None) -> Json:
        """All statistics by depth. Raises `NotFound` (the run)."""
        key = self._reads.key(run_id)
        try:
            found = self._series.layer_statistics_at(key, step)
        except NotFound:
            return {"step": None, "layers": [], "statistics": {}, "measured_at": {}}
        return {
            "step": found.step,
            "layers": list(found.layout.names),
            "statistics": {name: floats_to_json(row_L) for name, row_L in found.values.items()},
            "measured_at": dict(found.measured_at),
        }


def _metric_view(row: MetricRow) -> Json:
    section, slash, _ = row.name.partition("/")
    return {
        "name": row.name,
        "section": section if slash and section else NO_SECTION,
        "kind": row.kind,
        "ranks": list(row.ranks),
        "num_points": row.num_points,
        "first_step": row.first_step,
        "last_step": row.last_step,
        "last": float_to_json(row.last),
        "min": float_to_json(row.min),
        "max": float_to_json(row.max),
        "num_nonfinite": row.num_nonfinite,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCells:
    """Layers x buckets of one statistic; `found` None: there is nothing."""

    statistic: str
    reduce: Reduce
    layers: tuple[str, ...]
    found: Buckets | None = None
    first_step: int | None = None
    last_step: int | None = None

    def json(self) -> Json:
        """**LayerMap**."""
        view = {**self._head(), "steps": [], "values": [], "nonfinite": []}
        if self.found is not None:
            nonfinite_LB = self._nonfinite_BL(self.found).T
            layer_N, column_N = np.nonzero(nonfinite_LB)
            view["steps"] = self.found.first_step_B.tolist()
            view["values"] = floats_to_json(self._cells_BL(self.found).T, nan_is_null=True)
            view["nonfinite"] = np.stack(
                [layer_N, column_N, nonfinite_LB[layer_N, column_N]], axis=1
            ).tolist()
        return view

    def arrow(self) -> Response:
        """One row per column of the map; `value` and `nonfinite` are lists with an entry per layer."""
        nothing = np.empty((0, len(self.layers)))
        empty = _arrow_columns(np.empty(0, np.int64), nothing, nothing.astype(np.int64))
        if self.found is None:
            return arrow.stream(self._head(), [], empty)
        cells_BL, nonfinite_BL = self._cells_BL(self.found), self._nonfinite_BL(self.found)
        batch = _arrow_columns(self.found.first_step_B, cells_BL, nonfinite_BL)
        return arrow.stream(self._head(), [batch], empty)

    def _head(self) -> Json:
        return {
            "statistic": self.statistic,
            "reduce": self.reduce,
            "layers": list(self.layers),
            "bucket_width": 1 if self.found is None else self.found.width,
            "first_step": self.first_step,
            "last_step": self.last_step,
        }

    def _cells_BL(self, found: Buckets) -> NDArray[np.float64]:  # noqa: N802 - names of arrays end with their shape
        return {"max": found.max_BW, "min": found.min_BW, "mean": found.mean_BW}[self.reduce]

    @staticmethod
    def _nonfinite_BL(found: Buckets) -> NDArray[np.int64]:  # noqa: N802 - names of arrays end with their shape
        return found.num_nan_BW + found.num_pos_inf_BW + found.num_neg_inf_BW


def _arrow_columns(
    steps_B: NDArray[np.int64], cells_BL: NDArray[np.float64], nonfinite_BL: NDArray[np.int64]
) -> arrow.Columns:
    return {
        "step": arrow.wholes(steps_B),
        "value": arrow.real_lists(cells_BL),
        "nonfinite": arrow.whole_lists(nonfinite_BL),
    }
