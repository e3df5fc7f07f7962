"""Routes about metrics and what a chart draws of them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from gradiometer_server.api import arrow
from gradiometer_server.api.answers import Accept, RunId, answer
from gradiometer_server.api.point_reads import Export, ExportForm, PointReads
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.schemas import (
    DEFAULT_METRIC,
    MAX_PAGE,
    MetricList,
    MetricName,
    MetricNames,
    RunState,
    Step,
)
from gradiometer_server.api.series_query import SeriesQueries
from gradiometer_server.api.series_reads import SeriesReads
from gradiometer_server.api.series_schemas import (
    MAX_POINTS,
    LatestList,
    PointsPage,
    SeriesAnswers,
    SeriesQuery,
    TailAnswers,
    TailQuery,
)


def series_router(all_reads: Reads, reads: SeriesReads) -> APIRouter:
    """`/runs/{run}/metrics`, `/series/query`, `/series/tail`, `/runs/{run}/points` and `/latest`."""
    router = APIRouter(tags=["series"])
    queries, points = SeriesQueries(all_reads), PointReads(all_reads)

    @router.get("/runs/{run}/metrics", response_model=MetricList)
    def list_metrics(run: RunId) -> Response:
        """All metrics of a run, by name."""
        return answer(reads.metrics(run))

    @router.post("/series/query", response_model=SeriesAnswers, response_model_exclude_unset=True)
    def query_series(query: SeriesQuery, accept: Accept = None) -> Response:
        """A batch of series as buckets.

        Buckets are a power of two wide and aligned to multiples of it; empty ones are left out. Points that are no more
        than `buckets` come as they are. A series that does not exist is answered with its `error`, and the others all
        the same.
        """
        return queries.answer(query, as_arrow=arrow.is_wanted(accept))

    @router.post("/series/tail", response_model=TailAnswers, response_model_exclude_unset=True)
    def tail_series(query: TailQuery) -> Response:
        """Points that are new since a cursor: for readers that follow a run."""
        return answer(points.tail(query))

    @router.get("/runs/{run}/points", response_model=PointsPage)
    def export_points(
        run: RunId,
        metric: Annotated[MetricName, Query(description="a scalar metric")],
        rank: Annotated[int | None, Query(ge=0, description="null: merged over ranks")] = None,
        attempt: Annotated[int | None, Query(ge=1, description="null: the line over all attempts")] = None,
        from_: Annotated[Step | None, Query(alias="from", description="first step, inclusive")] = None,
        to: Annotated[Step | None, Query(description="last step, inclusive")] = None,
        format_: Annotated[ExportForm, Query(alias="format")] = "json",
        limit: Annotated[
            int | None,
            Query(ge=1, le=MAX_POINTS, description="points of a page; null: 10000 as JSON, all otherwise"),
        ] = None,
        cursor: Annotated[
            str | None, Query(max_length=60, description="`next_cursor` of the page before")
        ] = None,
        accept: Accept = None,
    ) -> Response:
        """Every point of a series exactly as it was logged, as JSON, CSV or Arrow."""
        form: ExportForm = (
            "arrow" if format_ == "arrow" or (format_ == "json" and arrow.is_wanted(accept)) else format_
        )
        asked = Export(
            run=run,
            metric=metric,
            rank=rank,
            attempt=attempt,
            first=from_,
            last=to,
            limit=limit,
            cursor=cursor,
        )
        return points.export(asked, form)

    @router.get("/latest", response_model=LatestList)
    def list_latest(
        metrics: MetricNames = (DEFAULT_METRIC,),
        project: Annotated[str | None, Query(description="only this project")] = None,
        state: Annotated[RunState | None, Query(description="only runs in this state")] = None,
        search: Annotated[
            str | None, Query(max_length=200, description="text in id, name, tags, group or notes")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
        cursor: Annotated[str | None, Query(description="`next_cursor` of the page before")] = None,
    ) -> Response:
        """The latest values of some metrics, of many runs at once; newest runs first."""
        return answer(
            all_reads.latest(metrics, project=project, state=state, search=search, limit=limit, cursor=cursor)
        )

    return router
