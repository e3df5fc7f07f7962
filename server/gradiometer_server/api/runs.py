"""Routes about runs and what they measure."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from gradiometer_server.api.answers import RunId, answer
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.schemas import MAX_NAMES, MAX_PAGE, MetricName, RunDetail, RunList, RunState


def runs_router(reads: Reads) -> APIRouter:
    """`/runs`, `/runs/{run}`, `/runs/{run}/metrics`."""
    router = APIRouter(tags=["runs"])

    @router.get("/runs", response_model=RunList)
    def list_runs(
        project: Annotated[str | None, Query(description="only this project")] = None,
        state: Annotated[RunState | None, Query(description="only runs in this state")] = None,
        search: Annotated[
            str | None, Query(max_length=200, description="text in id, name, tags, group or notes")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
        cursor: Annotated[str | None, Query(description="`next_cursor` of the page before")] = None,
        metrics: Annotated[
            tuple[MetricName, ...] | None,
            Query(
                max_length=MAX_NAMES,
                description="metrics whose latest values and summaries are wanted; repeat it for several",
            ),
        ] = None,
    ) -> Response:
        """Runs, newest first. `latest` and `summary` hold the metrics that `metrics` names: a run may have thousands.

        Without `metrics`, `latest` is of `train/loss`, and `summary` of what each run defined by name, 20 at most.
        """
        return answer(
            reads.runs(
                project=project, state=state, search=search, limit=limit, cursor=cursor, metrics=metrics
            )
        )

    @router.get("/runs/{run}", response_model=RunDetail)
    def get_run(run: RunId) -> Response:
        """One run with its config, sources and layers."""
        return answer(reads.run_detail(run))

    return router
