"""Routes about layer statistics: the heat map and the flow by depth."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from gradiometer_server.api import arrow
from gradiometer_server.api.answers import Accept, RunId, answer
from gradiometer_server.api.schemas import MAX_COLUMNS, LayerFlow, LayerMap, Statistic, Step
from gradiometer_server.api.series_reads import Reduce, SeriesReads


def layers_router(reads: SeriesReads) -> APIRouter:
    """`/runs/{run}/layers` and `/runs/{run}/layers/flow`."""
    router = APIRouter(tags=["layers"])

    @router.get("/runs/{run}/layers", response_model=LayerMap)
    def get_layers(
        run: RunId,
        statistic: Annotated[Statistic, Query(description="which layer statistic")] = "norm",
        from_: Annotated[Step | None, Query(alias="from", description="first step, inclusive")] = None,
        to: Annotated[Step | None, Query(description="last step, inclusive")] = None,
        columns: Annotated[int, Query(ge=1, le=MAX_COLUMNS, description="at most this many columns")] = 1000,
        reduce: Annotated[Reduce, Query(description="what a cell shows of its finite values")] = "max",
        accept: Accept = None,
    ) -> Response:
        """Layers x steps of one statistic. A run without layer statistics is answered with no layers."""
        as_arrow = arrow.is_wanted(accept)
        cells = reads.layers(run, statistic, from_, to, columns, reduce)
        return cells.arrow() if as_arrow else answer(cells.json())

    @router.get("/runs/{run}/layers/flow", response_model=LayerFlow)
    def get_flow(
        run: RunId, step: Annotated[Step | None, Query(description="null: the newest step")] = None
    ) -> Response:
        """All statistics by depth at the last step with any at or before `step`; none: no layers."""
        return answer(reads.flow(run, step))

    return router
