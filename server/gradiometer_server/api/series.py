"""Routes about metrics and what a chart draws of them."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from gradiometer_server.api.answers import RunId, answer
from gradiometer_server.api.schemas import MetricList, SeriesAnswers, SeriesQuery
from gradiometer_server.api.series_reads import SeriesReads


def series_router(reads: SeriesReads) -> APIRouter:
    """`/runs/{run}/metrics` and `/series/query`."""
    router = APIRouter(tags=["series"])

    @router.get("/runs/{run}/metrics", response_model=MetricList)
    def list_metrics(run: RunId) -> Response:
        """All metrics of a run, by name."""
        return answer(reads.metrics(run))

    @router.post("/series/query", response_model=SeriesAnswers, response_model_exclude_unset=True)
    def query_series(query: SeriesQuery) -> Response:
        """A batch of series as buckets.

        Buckets are a power of two of steps wide and aligned to multiples of it; empty ones are left out. A width of 1
        means raw points. A series that does not exist is answered with its `error`, and the others all the same.
        """
        return answer(reads.query(query))

    return router
