"""Routes that change or delete a run."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Query
from starlette.responses import Response

from gradiometer_server.api.answers import RunId, answer
from gradiometer_server.api.edit_schemas import RunDeleted, RunPatch
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.schemas import RunDetail
from gradiometer_server.errors import InvalidRequest
from gradiometer_server.store.edits import RunEdit


class Changes(Protocol):
    """Changes runs. All methods block; they raise `NotFound` for an unknown run."""

    def edit(self, run_id: str, edit: RunEdit) -> None:
        """Change the description of a run. Raises `InvalidRequest`."""
        ...

    def delete(self, run_id: str, *, force: bool) -> float:
        """Delete a run; when, in Unix seconds. Raises `Conflict` if it is running and not forced."""
        ...


def edits_router(reads: Reads, changes: Changes) -> APIRouter:
    """`PATCH` and `DELETE` of `/runs/{run}`."""
    router = APIRouter(tags=["runs"])

    @router.patch("/runs/{run}", response_model=RunDetail)
    def edit_run(run: RunId, patch: RunPatch) -> Response:
        """Change name, tags, notes, group or config. What an agent said before does not undo it; new words do."""
        changes.edit(run, patch.edit())
        return answer(reads.run_detail(run))

    @router.delete("/runs/{run}", response_model=RunDeleted)
    def delete_run(
        run: RunId,
        confirm: Annotated[
            str | None, Query(description="the run's id once more, so that nothing is deleted by mistake")
        ] = None,
        force: Annotated[bool, Query(description="also while it is running")] = False,
    ) -> Response:
        """Delete a run with all its data, for good. Its agents are told, and what they still hold is refused."""
        if confirm != run:
            given = "is missing" if confirm is None else f"is {confirm!r:.140}"
            raise InvalidRequest(
                f"confirm {given}; deleting run {run!r} needs its id there.", field="query.confirm",
                remedy="Add ?confirm=<run id>, percent-encoded, if the run is really to be deleted.",
            )  # fmt: skip
        return answer({"id": run, "deleted_s": changes.delete(run, force=force)})

    return router
