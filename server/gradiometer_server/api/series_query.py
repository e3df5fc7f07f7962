"""`POST /series/query`: what was asked for as things to draw, and what was drawn as JSON or Arrow. Blocks; call it in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from gradiometer_server.api import arrow
from gradiometer_server.api.answers import json_answer
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.schemas import MAX_STEP
from gradiometer_server.api.series_schemas import MAX_ALL_BUCKETS, MAX_SERIES, SeriesQuery, SeriesRef
from gradiometer_server.api.views import Json
from gradiometer_server.domain.jsonable import dumps, float_to_json, floats_to_json
from gradiometer_server.errors import InvalidRequest, NotFound
from gradiometer_server.store.charts import Wanted
from gradiometer_server.store.drawing import Chart, Drawn
from gradiometer_server.store.lines import EVERY, LineRef
from gradiometer_server.summaries.axis import LEAST_BUCKETS

_COLUMNS: Final = ("step", "count", "mean", "min", "max", "nan", "pos_inf", "neg_inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """One answer's worth of series: several refs if they are a group. Runs that do not exist are left out of `keys`."""

    refs: tuple[SeriesRef, ...]
    keys: tuple[int | None, ...]
    is_band: bool

    @property
    def known(self) -> tuple[SeriesRef, ...]:
        return tuple(ref for ref, key in zip(self.refs, self.keys, strict=True) if key is not None)


class SeriesQueries:
    """Answers series queries. Thread-safe."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def answer(self, query: SeriesQuery, *, as_arrow: bool) -> Response:
        """A batch of series; what is wrong with one of them is its `error`.

        Raises:
            InvalidRequest: an impossible range, an axis without its metric, or more than can be answered at once.
            StoreUnavailable: the database does not answer, so none of them can be read.
        """
        chart, refs = _chart_of(query), _refs_of(query)
        asks = self._asks(refs, query)
        answers = self._drawn(asks, chart, query)
        if as_arrow:
            return _as_arrow(list(answers), chart)
        parts = [dumps({**head, "points": _points_view(drawn)}) for head, drawn in answers]
        return json_answer(b'{"series":[' + b",".join(parts) + b"]}")

    def _asks(self, refs: Sequence[SeriesRef], query: SeriesQuery) -> list[_Ask]:
        keys = self._reads.keys({ref.run for ref in refs})
        groups: dict[object, list[SeriesRef]] = {}
        for place, ref in enumerate(refs):
            groups.setdefault(place if ref.group is None else (ref.group, ref.metric), []).append(ref)
        return [
            _Ask(
                refs=tuple(some),
                keys=tuple(keys.get(ref.run) for ref in some),
                is_band=query.ranks == "band" and some[0].group is None and some[0].rank is None,
            )
            for some in groups.values()
        ]

    def _drawn(
        self, asks: Sequence[_Ask], chart: Chart, query: SeriesQuery
    ) -> Iterator[tuple[Json, Drawn | None]]:
        wanted = [
            Wanted(
                refs=tuple(
                    _line_ref(ref, key, query)
                    for ref, key in zip(ask.refs, ask.keys, strict=True)
                    if key is not None
                ),
                is_folded=ask.is_band or ask.refs[0].group is not None,
            )
            for ask in asks
            if ask.known
        ]
        drawn = iter(self._reads.charts.draw(wanted, chart))
        for ask in asks:
            if not ask.known:
                yield _head(ask, None, str(NotFound("run", ask.refs[0].run)), chart), None
                continue
            for one in next(drawn):
                yield _head(ask, one, None if one.error is None else str(one.error), chart), one


def _refs_of(query: SeriesQuery) -> list[SeriesRef]:
    if bool(query.runs) != bool(query.metrics):
        raise InvalidRequest(
            "`runs` and `metrics` belong together.",
            field="body.runs",
            remedy="Give both, or a list of `series`.",
        )
    refs = [
        *query.series,
        *(SeriesRef(run=run, metric=metric, group=query.group) for metric in query.metrics for run in query.runs),
    ]  # fmt: skip
    if not refs:
        raise InvalidRequest("no series was asked for.", field="body.series", remedy="Name at least one.")
    if len(refs) > MAX_SERIES or len(refs) * query.buckets > MAX_ALL_BUCKETS:
        raise InvalidRequest(
            f"{len(refs)} series of {query.buckets} buckets are too many for one request; it may be {MAX_SERIES} series, "
            f"and {MAX_ALL_BUCKETS} buckets of all together.",
            field="body.series",
            remedy="Ask for fewer series, or for fewer buckets.",
        )
    return refs


def _chart_of(query: SeriesQuery) -> Chart:
    if (query.x == "metric") != (query.x_metric is not None):
        raise InvalidRequest(
            "`x_metric` belongs to `x: metric`.", field="body.x_metric", remedy="Give both or neither."
        )
    if query.x == "step":
        for name, value in (("from", query.from_), ("to", query.to)):
            if value is not None and not (0 <= value <= MAX_STEP and value == int(value)):
                raise InvalidRequest(
                    f"{name} is {value:.17g}; a step is a whole number from 0 to 2**53 - 1.",
                    field=f"body.{name}",
                )
    elif query.buckets < LEAST_BUCKETS:
        raise InvalidRequest(
            f"over {query.x} there are at least {LEAST_BUCKETS} buckets.",
            field="body.buckets",
            remedy="Ask for more.",
        )
    if query.from_ is not None and query.to is not None and query.from_ > query.to:
        raise InvalidRequest(
            f"the range begins at {query.from_:.17g} but ends at {query.to:.17g}.",
            field="body.from",
            remedy="Give a beginning that is not beyond the end.",
        )
    return Chart(
        axis=query.x, metric=query.x_metric, first=query.from_, last=query.to, buckets=query.buckets, smoothing=query.smoothing
    )  # fmt: skip


def _line_ref(ref: SeriesRef, key: int, query: SeriesQuery) -> LineRef:
    if ref.rank is None and query.ranks != "merged":
        return LineRef(run_key=key, key=ref.metric, rank=EVERY, attempt=ref.attempt)
    return LineRef(run_key=key, key=ref.metric, rank=ref.rank, attempt=ref.attempt)


def _head(ask: _Ask, drawn: Drawn | None, error: str | None, chart: Chart) -> Json:
    """What is said of a series beside its points."""
    first = ask.refs[0]
    is_group = first.group is not None
    own_rank = drawn.owners[0].rank if drawn is not None and not ask.is_band and not is_group else first.rank
    head: Json = {"run": None if is_group else first.run, "metric": first.metric, "rank": own_rank}
    if is_group:
        head["group"] = first.group
    if (is_group or ask.is_band) and drawn is not None and drawn.error is None:
        known = ask.known
        head["members"] = [{"run": known[one.place].run, "rank": one.rank} for one in drawn.owners]
        drawn_refs = {id(known[one.place]) for one in drawn.owners}
        missing = [{"run": ref.run, "rank": ref.rank} for ref in ask.refs if id(ref) not in drawn_refs]
        if missing:
            head["missing"] = missing
    head["bucket_width"] = 1 if drawn is None else drawn.width
    head["first_step"] = None if drawn is None else drawn.first_step
    head["last_step"] = None if drawn is None else drawn.last_step
    if chart.axis != "step":
        head["first_x"] = float_to_json(None if drawn is None else drawn.first_x)
        head["last_x"] = float_to_json(None if drawn is None else drawn.last_x)
    return head if error is None else {**head, "error": error}


def _points_view(drawn: Drawn | None) -> Json:
    if drawn is None or drawn.buckets is None:
        return {name: [] for name in _COLUMNS}
    found = drawn.buckets
    # A bucket without a finite value has NaN for mean, min and max, which stands for "nothing to compute from"; an
    # infinite mean of finite values is an overflow and is shown as what it is.
    view: Json = {
        "step": found.first_step_B.tolist(),
        "count": found.num_finite_BW[:, 0].tolist(),
        "mean": floats_to_json(found.mean_BW[:, 0], nan_is_null=True),
        "min": floats_to_json(found.min_BW[:, 0], nan_is_null=True),
        "max": floats_to_json(found.max_BW[:, 0], nan_is_null=True),
        "nan": found.num_nan_BW[:, 0].tolist(),
        "pos_inf": found.num_pos_inf_BW[:, 0].tolist(),
        "neg_inf": found.num_neg_inf_BW[:, 0].tolist(),
    }
    if drawn.x_B is not None:
        view["x"] = floats_to_json(drawn.x_B)
    if drawn.smoothed_B is not None:
        view["smoothed"] = floats_to_json(drawn.smoothed_B, nan_is_null=True)
    if drawn.combined is not None:
        view["members"] = drawn.combined.num_members_B.tolist()
        view["min_member"] = _places(drawn.combined.min_member_B)
        view["max_member"] = _places(drawn.combined.max_member_B)
    return view


def _places(member_B: NDArray[np.int64]) -> list[int | None]:
    return [None if place < 0 else place for place in member_B.tolist()]


def _as_arrow(answers: Sequence[tuple[Json, Drawn | None]], chart: Chart) -> Response:
    """One batch per series that has points; column `series` is its place in the list of the metadata."""
    is_folded = any(drawn is not None and drawn.combined is not None for _, drawn in answers)
    batches = [
        _arrow_columns(place, drawn, chart, is_folded=is_folded)
        for place, (_, drawn) in enumerate(answers)
        if drawn is not None and drawn.buckets is not None
    ]
    empty = _arrow_columns(0, None, chart, is_folded=is_folded)
    return arrow.stream({"series": [head for head, _ in answers]}, batches, empty)


def _arrow_columns(place: int, drawn: Drawn | None, chart: Chart, *, is_folded: bool) -> arrow.Columns:
    none = np.empty(0, np.int64)
    found = None if drawn is None else drawn.buckets
    num = 0 if found is None else len(found.first_step_B)

    def column(name: str) -> NDArray[Any]:
        return none if found is None else getattr(found, name)[:, 0]

    columns: dict[str, Any] = {
        "series": arrow.wholes(np.full(num, place)),
        "step": arrow.wholes(none if found is None else found.first_step_B),
        "count": arrow.wholes(column("num_finite_BW")),
        "mean": arrow.reals(column("mean_BW"), nan_is_null=True),
        "min": arrow.reals(column("min_BW"), nan_is_null=True),
        "max": arrow.reals(column("max_BW"), nan_is_null=True),
        "nan": arrow.wholes(column("num_nan_BW")),
        "pos_inf": arrow.wholes(column("num_pos_inf_BW")),
        "neg_inf": arrow.wholes(column("num_neg_inf_BW")),
    }
    nothing = np.full(num, np.nan)
    if chart.axis != "step":
        columns["x"] = arrow.reals(nothing if drawn is None or drawn.x_B is None else drawn.x_B)
    if chart.smoothing is not None:
        smoothed_B = None if drawn is None else drawn.smoothed_B
        columns["smoothed"] = arrow.reals(nothing if smoothed_B is None else smoothed_B, nan_is_null=True)
    if is_folded:
        one, nobody = None if drawn is None else drawn.combined, np.full(num, -1)
        columns["members"] = arrow.wholes(np.ones(num, np.int64) if one is None else one.num_members_B)
        columns["min_member"] = arrow.wholes(
            nobody if one is None else one.min_member_B, negative_is_null=True
        )
        columns["max_member"] = arrow.wholes(
            nobody if one is None else one.max_member_B, negative_is_null=True
        )
    return columns
