"""`/healthz`: the process lives. `/readyz`: it can do its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import APIRouter

from gradiometer_server import __version__
from gradiometer_server.api.problems import Problem
from gradiometer_server.api.schemas import Health, Readiness


def health_router(check_ready: Callable[[], str], tally: Callable[[], Mapping[str, int]]) -> APIRouter:
    """Both routes.

    Args:
        check_ready: returns the database's revision; raises a `GradiometerError` when the server cannot serve. Blocks.
        tally: what agents got wrong so far, by code.
    """
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> Health:
        """Whether the process is alive."""
        return Health(status="ok", version=__version__)

    @router.get("/readyz", responses={503: {"model": Problem}})
    def readyz() -> Readiness:
        """Whether the database answers, its tables are those of this version, and the last write was taken."""
        return Readiness(status="ready", revision=check_ready(), ingest=dict(tally()))

    return router
