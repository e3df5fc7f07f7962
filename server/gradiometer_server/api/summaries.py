"""The route that says what each scalar metric of a run came to."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gradiometer_server.api.answers import RunId, answer
from gradiometer_server.api.reads import Reads
from gradiometer_server.domain.jsonable import JsonFloat, float_to_json
from gradiometer_server.errors import NotFound
from gradiometer_server.store.definitions import Definition, best_of, definition_for, list_definitions
from gradiometer_server.store.metric_rows import MetricRow

Number = float | Literal["NaN", "Infinity", "-Infinity"] | None


class MetricSummary(BaseModel):
    """One scalar metric, merged over ranks, over all attempts."""

    model_config = ConfigDict(extra="forbid")
    name: str
    summary: Literal["last", "min", "max", "mean", "best"] = Field(
        description="what `value` is, as `run.define_metric` said; `last` where nothing was said"
    )
    value: Number
    last: Number
    min: Number = Field(description="over finite values")
    max: Number = Field(description="over finite values")
    best: Number = Field(description="`min` or `max`, by `goal`; null without one")
    goal: Literal["minimize", "maximize"] | None
    mean: Number = Field(description="over finite values; null unless it is the summary")
    num_points: int
    num_nonfinite: int
    first_step: int | None
    last_step: int | None
    step_metric: str | None = Field(description="the metric to draw it over; null: the step")


class RunSummary(BaseModel):
    """Scalar metrics of a run by name."""

    model_config = ConfigDict(extra="forbid")
    metrics: list[MetricSummary]


class SummaryReads:
    """Reads summaries; blocks."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def of_run(self, run_id: str) -> dict[str, Any]:
        """All scalar metrics of a run. Raises `NotFound`."""
        key = self._reads.key(run_id)
        with self._reads.database.read() as conn:
            definitions = list_definitions(conn, key)
        rows = [row for row in self._reads.series.metrics(key) if row.kind == "scalar"]
        return {"metrics": [self._view(key, row, definition_for(definitions, row.name)) for row in rows]}

    def _view(self, key: int, row: MetricRow, definition: Definition | None) -> dict[str, Any]:
        summary = "last" if definition is None else definition.summary
        goal = None if definition is None else definition.goal
        figures: dict[str, float | None] = {
            "last": row.last,
            "min": row.min,
            "max": row.max,
            "best": best_of(goal, row.min, row.max),
            "mean": self._mean(key, row) if summary == "mean" else None,
        }
        numbers: dict[str, JsonFloat] = {name: float_to_json(value) for name, value in figures.items()}
        return {
            "name": row.name,
            "summary": summary,
            "value": numbers[summary],
            **numbers,
            "goal": goal,
            "num_points": row.num_points,
            "num_nonfinite": row.num_nonfinite,
            "first_step": row.first_step,
            "last_step": row.last_step,
            "step_metric": None if definition is None else definition.step_metric,
        }

    def _mean(self, key: int, row: MetricRow) -> float | None:
        try:
            buckets, _, _ = self._reads.series.query(key, row.name, buckets=1)
        except NotFound:
            # Metrics that only single ranks have are not merged, and have no one mean.
            return None
        return float(buckets.mean_BW[0, 0]) if buckets.num_finite_BW.any() else None


def summaries_router(reads: SummaryReads) -> APIRouter:
    """`/runs/{run}/summary`."""
    router = APIRouter(tags=["runs"])

    @router.get("/runs/{run}/summary", response_model=RunSummary)
    def get_summary(run: RunId) -> Response:
        """What each scalar metric came to: last, smallest, largest, and the value that was defined to stand for it."""
        return answer(reads.of_run(run))

    return router
