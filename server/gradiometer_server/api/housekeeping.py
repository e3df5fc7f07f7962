"""The route that says what retention is set to, and what it has done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gradiometer_server.api.answers import answer
from gradiometer_server.housekeeping.keeper import Keeper


class RetentionView(BaseModel):
    """What old runs lose; null: never. Set with `GRADIOMETER_RETENTION_*`."""

    model_config = ConfigDict(extra="forbid")
    detail_days: float | None = Field(description="age at which a run loses its rings and histograms")
    thin_days: float | None = Field(description="age at which it loses its raw points; summaries stay")
    delete_days: float | None = Field(description="age at which it is deleted")
    max_bytes: int | None = Field(
        description="size beyond which the oldest runs lose details, then raw points"
    )
    delete_for_space: bool = Field(description="and are then deleted")
    interval_s: float


class HousekeepingView(BaseModel):
    """What the housekeeping did since the server started."""

    model_config = ConfigDict(extra="forbid")
    retention: RetentionView
    last_pass_s: float | None = Field(description="Unix seconds at which retention was last applied")
    details_dropped: int = Field(description="runs that lost their rings and histograms")
    runs_thinned: int = Field(description="runs that lost raw points")
    runs_deleted: int = Field(description="runs that retention deleted")
    runs_purged: int = Field(description="deleted runs, whoever deleted them, of which nothing is left")
    freed_bytes: int = Field(description="what retention removed, as it was stored")
    released_bytes: int = Field(description="given back to the disk; SQLite only")
    failures: int = Field(description="passes that were cut short and repeated")
    last_failure: str | None


def housekeeping_router(keeper: Callable[[], Keeper]) -> APIRouter:
    """`/housekeeping`. `keeper` raises `StoreUnavailable` before the start is done."""
    router = APIRouter(tags=["server"])

    @router.get("/housekeeping", response_model=HousekeepingView)
    def get_housekeeping() -> Response:
        """Retention as it is set, and what was removed since the server started."""
        found = keeper()
        return answer({"retention": asdict(found.retention), **asdict(found.figures)})

    return router
