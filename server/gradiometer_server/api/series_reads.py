"""What REST reads about series and layers. Every method blocks; call it in a thread.

Shape letters: B buckets, L layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradiometer_server.api.reads import Reads
from gradiometer_server.api.schemas import SeriesQuery, SeriesRef
from gradiometer_server.api.views import Json
from gradiometer_server.domain.jsonable import float_to_json, floats_to_json
from gradiometer_server.domain.names import LAYER_PREFIX
from gradiometer_server.domain.series import Buckets
from gradiometer_server.errors import GradiometerError, InvalidRequest, NotFound, StoreUnavailable
from gradiometer_server.store.query import MetricRow, SeriesReader

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

    def query(self, query: SeriesQuery) -> Json:
        """A batch of series; what is wrong with one of them is its `error`.

        Raises:
            InvalidRequest: the range ends before it begins.
            StoreUnavailable: the database does not answer, so none of them can be read.
        """
        if query.from_ is not None and query.to is not None and query.from_ > query.to:
            raise InvalidRequest(
                f"the range begins at step {query.from_} but ends at {query.to}.",
                field="body.from",
                remedy="Give a first step that is not beyond the last one.",
            )
        keys: dict[str, int | None] = {ref.run: self._reads.find_key(ref.run) for ref in query.series}
        return {"series": [self._one(ref, keys[ref.run], query) for ref in query.series]}

    def _one(self, ref: SeriesRef, key: int | None, query: SeriesQuery) -> Json:
        named = {"run": ref.run, "metric": ref.metric, "rank": ref.rank}
        try:
            if key is None:
                raise NotFound("run", ref.run)
            found, first, last = self._series.query(
                key, ref.metric, ref.rank, query.from_, query.to, query.buckets, attempt=ref.attempt
            )
            if found.mean_BW.shape[1] != 1:
                raise InvalidRequest(
                    f"{ref.metric!r} is a layer statistic.", remedy="Ask /runs/{run}/layers for it."
                )
        except StoreUnavailable:
            raise
        except GradiometerError as error:
            nothing = {"bucket_width": 1, "first_step": None, "last_step": None, "points": _NO_POINTS}
            return {**named, **nothing, "error": str(error)}
        steps = {"bucket_width": found.width, "first_step": first, "last_step": last}
        return {**named, **steps, "points": _points_view(found)}

    def layers(self, run_id: str, statistic: str, first: int | None, last: int | None, columns: int) -> Json:
        """The heat map of one statistic. Raises `NotFound` (the run), `InvalidRequest`."""
        key = self._reads.key(run_id)
        try:
            layout, found = self._series.layers(key, statistic, first, last, columns)
        except NotFound:
            return _map_view(statistic, (), None, None, None)
        name = LAYER_PREFIX + statistic
        row = next((row for row in self._series.metrics(key) if row.name == name), None)
        begin, end = (None, None) if row is None else (row.first_step, row.last_step)
        return _map_view(statistic, layout.names, found, begin, end)

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


_NO_POINTS: dict[str, list[Any]] = {
    name: [] for name in ("step", "count", "mean", "min", "max", "nan", "pos_inf", "neg_inf")
}


def _points_view(found: Buckets) -> Json:
    # A bucket without a finite value has NaN for mean, min and max, which stands for "nothing to compute from"; an
    # infinite mean of finite values is an overflow and is shown as what it is.
    return {
        "step": found.first_step_B.tolist(),
        "count": found.num_finite_BW[:, 0].tolist(),
        "mean": floats_to_json(found.mean_BW[:, 0], nan_is_null=True),
        "min": floats_to_json(found.min_BW[:, 0], nan_is_null=True),
        "max": floats_to_json(found.max_BW[:, 0], nan_is_null=True),
        "nan": found.num_nan_BW[:, 0].tolist(),
        "pos_inf": found.num_pos_inf_BW[:, 0].tolist(),
        "neg_inf": found.num_neg_inf_BW[:, 0].tolist(),
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


def _map_view(
    statistic: str, layers: tuple[str, ...], found: Buckets | None, first: int | None, last: int | None
) -> Json:
    if found is None:
        cells, counts, steps, width = [], [], [], 1
    else:
        bad_LB = (found.num_nan_BW + found.num_pos_inf_BW + found.num_neg_inf_BW).T
        layer_N, column_N = np.nonzero(bad_LB)
        counts = np.stack([layer_N, column_N, bad_LB[layer_N, column_N]], axis=1).tolist()
        cells = floats_to_json(found.max_BW.T, nan_is_null=True)
        steps, width = found.first_step_B.tolist(), found.width
    return {
        "statistic": statistic,
        "layers": list(layers),
        "bucket_width": width,
        "steps": steps,
        "values": cells,
        "nonfinite": counts,
        "first_step": first,
        "last_step": last,
    }
