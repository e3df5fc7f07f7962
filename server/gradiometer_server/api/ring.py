"""Routes about rings: the last steps of single ranks in full detail, kept when something went wrong."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from gradiometer_server.api.answers import RunId, answer
from gradiometer_server.api.ring_reads import RingReads
from gradiometer_server.api.schemas import MAX_COLUMNS, LayerMap, RingOverview, Statistic, Step


def ring_router(reads: RingReads) -> APIRouter:
    """`/runs/{run}/ring` and `/runs/{run}/ring/layers`."""
    router = APIRouter(tags=["layers"])

    @router.get("/runs/{run}/ring", response_model=RingOverview)
    def get_ring(run: RunId) -> Response:
        """Which ranks sent their last steps in full detail, and why. Empty if none did."""
        return answer(reads.overview(run))

    @router.get("/runs/{run}/ring/layers", response_model=LayerMap)
    def get_ring_layers(
        run: RunId,
        rank: Annotated[int, Query(ge=0, description="whose ring")] = 0,
        statistic: Annotated[Statistic, Query(description="which layer statistic")] = "norm",
        from_: Annotated[Step | None, Query(alias="from", description="first step, inclusive")] = None,
        to: Annotated[Step | None, Query(description="last step, inclusive")] = None,
        columns: Annotated[
            int, Query(ge=1, le=MAX_COLUMNS, description="at most the last so many steps")
        ] = 1000,
    ) -> Response:
        """Layers x steps of one statistic of this rank's own shards, step by step, as `/runs/{run}/layers`."""
        return answer(reads.layers(run, rank, statistic, from_, to, columns))

    return router
