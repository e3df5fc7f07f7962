"""Routes about alerts."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.responses import Response

from gradiometer_server.api.answers import AlertId, RunId, answer
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.schemas import MAX_PAGE, Alert, AlertList

State = Annotated[Literal["firing", "resolved"] | None, Query(description="only alerts in this state")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Cursor = Annotated[str | None, Query(description="`next_cursor` of the page before")]


def alerts_router(reads: Reads) -> APIRouter:
    """`/alerts`, `/runs/{run}/alerts`, `/runs/{run}/alerts/{id}`."""
    router = APIRouter(tags=["alerts"])

    @router.get("/alerts", response_model=AlertList)
    def list_alerts(
        run: Annotated[str | None, Query(max_length=128, description="only this run")] = None,
        state: State = None,
        limit: Limit = 100,
        cursor: Cursor = None,
    ) -> Response:
        """Alerts of one run or of all, newest first."""
        return answer(reads.alerts(run_id=run, state=state, limit=limit, cursor=cursor))

    @router.get("/runs/{run}/alerts", response_model=AlertList)
    def list_run_alerts(
        run: RunId, state: State = None, limit: Limit = 100, cursor: Cursor = None
    ) -> Response:
        """Alerts of a run, newest first."""
        return answer(reads.alerts(run_id=run, state=state, limit=limit, cursor=cursor))

    @router.get("/runs/{run}/alerts/{alert}", response_model=Alert)
    def get_alert(run: RunId, alert: AlertId) -> Response:
        """One alert."""
        return answer(reads.alert(run, alert))

    return router
