"""Routes about histograms of gradients, and the one that asks agents for them."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Query
from starlette.responses import Response

from gradiometer_server.api.answers import RunId, answer
from gradiometer_server.api.histogram_reads import HistogramReads
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.schemas import (
    MAX_PAGE,
    CommandAnswer,
    CommandRequest,
    HistogramOverview,
    LayerHistograms,
    Step,
)
from gradiometer_server.domain.commands import Asked
from gradiometer_server.errors import Conflict


class Asks(Protocol):
    """Sends commands to the agents of a run."""

    def ask(self, run_id: str, *, kind: str, rank: int | None, reason: str) -> Asked | None:
        """What was asked; None: nobody is there who understands it."""
        ...


def histograms_router(reads: HistogramReads) -> APIRouter:
    """`/runs/{run}/histograms` and `/runs/{run}/histograms/layers`."""
    router = APIRouter(tags=["layers"])

    @router.get("/runs/{run}/histograms", response_model=HistogramOverview)
    def list_histograms(
        run: RunId,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="at most so many of the newest")] = 100,
    ) -> Response:
        """Steps of which histograms were taken, from which ranks, and why. Empty if there are none."""
        return answer(reads.overview(run, limit))

    @router.get("/runs/{run}/histograms/layers", response_model=LayerHistograms)
    def get_layer_histograms(
        run: RunId,
        step: Annotated[Step | None, Query(description="which step; by default the newest there is")] = None,
        layer: Annotated[str | None, Query(max_length=500, description="only this layer")] = None,
        rank: Annotated[int | None, Query(ge=0, description="only this rank's own shards")] = None,
    ) -> Response:
        """Elements per bin of log2 magnitude of each layer's unscaled gradient, before clipping."""
        return answer(reads.layers(run, step, layer, rank))

    return router


def commands_router(reads: Reads, desk: Asks) -> APIRouter:
    """`/runs/{run}/commands`."""
    router = APIRouter(tags=["runs"])

    @router.post("/runs/{run}/commands", response_model=CommandAnswer, status_code=202)
    def ask_agents(run: RunId, command: CommandRequest) -> Response:
        """Ask the agents of a run that are connected. 409 if none is, or the run has ended."""
        state = reads.run(run)["state"]
        if state not in ("running", "lost"):
            raise Conflict(
                f"run {run!r} has ended ({state}).", code="run_ended", remedy="Ask while the run is training."
            )
        reason = command.reason or "asked for over REST"
        asked = desk.ask(run, kind=command.kind, rank=command.rank, reason=reason)
        if asked is None:
            whom = "No agent" if command.rank is None else f"No agent of rank {command.rank}"
            raise Conflict(
                f"{whom} of run {run!r} that understands {command.kind!r} is connected.",
                code="no_agent",
                remedy="Ask while the run is training; an older agent has to be upgraded first.",
            )
        return answer(
            {
                "id": asked.command_id,
                "kind": command.kind,
                "asked": len(asked.ranks),
                "ranks": list(asked.ranks),
                "step": asked.step,
            },
            status=202,
        )

    return router
