"""What REST takes and answers, for OpenAPI and for checking requests.

Answers are built as plain dictionaries and encoded by msgspec (a heat map has 150,000 cells); these models are their
published shape, and a test holds real answers against them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, field_validator

from gradiometer_server.domain.folded import LAYER_STATISTICS

Number = float | Literal["NaN", "Infinity", "-Infinity"] | None
"""A float; not finite: a string; null: absent."""

MAX_COLUMNS = 4000
MAX_PAGE = 1000
MAX_NAMES = 50
DEFAULT_METRIC = "train/loss"
MAX_STEP = 2**53 - 1

RunState = Literal["running", "finished", "failed", "crashed", "lost"]
Severity = Literal["info", "warning", "error", "critical"]
Statistic = Literal["norm", "rms", "mean", "std", "abs_max", "zero_fraction", "num_nonfinite"]
assert Statistic.__args__ == LAYER_STATISTICS  # type: ignore[attr-defined]

Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
MetricName = Annotated[str, Field(min_length=1, max_length=500)]
MetricNames = Annotated[
    tuple[MetricName, ...],
    Query(max_length=MAX_NAMES, description="metrics whose latest values are wanted; repeat it for several"),
]


class Request(BaseModel):
    """A body that is a question; without fields that are true or false."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: Any) -> Any:
        """`true` would be taken as 1 wherever a number is wanted."""
        if isinstance(value, bool):
            raise ValueError("is true or false, which no field of this body is")
        return value


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Exit(_Answer):
    """How a run ended."""

    code: int | None = Field(description="exit code of the process")
    signal: str | None = Field(description="signal that ended it, e.g. `SIGKILL`")
    reason: str = Field(description="in words")
    inferred: bool = Field(description="true: the agent saw the process gone rather than being told")
    exception: str | None = Field(description="the exception that ended it, e.g. `ValueError: bad shape`")


class AlertCounts(_Answer):
    """Episodes of a run."""

    firing: int
    total: int


class Run(_Answer):
    """One training job."""

    id: str
    project: str
    name: str
    state: RunState = Field(description="`lost`: no heartbeat for 30 s; recovers")
    created_s: float = Field(description="Unix seconds")
    updated_s: float = Field(description="Unix seconds of the last sign of life")
    finished_s: float | None = Field(description="Unix seconds; null while it runs")
    attempts: int = Field(description="launches so far")
    world_size: int = Field(description="ranks of the last attempt")
    last_step: int | None = Field(description="last step with a value")
    tags: list[str]
    notes: str
    group: str | None
    exit: Exit | None
    latest: dict[str, Number] = Field(
        description="last value of each scalar metric; in lists: of those asked for"
    )
    summary: dict[str, Number] = Field(
        description="metric -> what stands for it (last, min, max or best), for metrics that `run.define_metric` named; a "
        "mean is only in `/runs/{run}/summary`"
    )
    alerts: AlertCounts
    rejected_records: int = Field(description="records refused by the server")
    dropped_reports: int = Field(description="reports that agents had to discard")
    thinned_s: float | None = Field(
        description="Unix seconds at which retention dropped the raw points; summaries are left. Null: they are there"
    )


class Source(_Answer):
    """One writer: a rank in one attempt."""

    rank: int
    attempt: int = Field(description="ordinal from 1")
    world_size: int
    host: str
    pid: int
    started_s: float
    start_step: int = Field(
        description="steps complete before this attempt; older attempts are cut after them"
    )
    last_step: int | None
    dropped_reports: int
    acked_seq: int = Field(description="last record that is durable")
    folded_seq: int = Field(description="last record that is folded")
    environment: dict[str, str]
    exit: Exit | None


class LayoutView(_Answer):
    """The layers of a run in depth order, input side first."""

    layout_id: int
    layers: list[str]
    numels: list[int]


class Dump(_Answer):
    """A step that a flight recorder saved before its update; the files are on the trainers' own disks."""

    attempt: int = Field(description="ordinal from 1")
    step: int
    rank: int = Field(description="the lowest rank that saw it go wrong")
    host: str
    path: str
    reason: str
    num_bytes: int
    saved_s: float


class RunDetail(Run):
    """A run with everything that does not fit a list."""

    config: dict[str, Any]
    sources: list[Source]
    unavailable: dict[str, str] = Field(description="metric -> why it cannot be collected")
    layouts: list[LayoutView]
    dumps: list[Dump] = Field(description="steps that flight recorders saved, oldest first")


class RunList(_Answer):
    """A page of runs, newest first."""

    runs: list[Run]
    next_cursor: str | None = Field(
        description="hand this back as `cursor` for the next page; null: the last one"
    )


class Metric(_Answer):
    """A metric of a run, over all attempts."""

    name: str
    section: str = Field(description="the part of the name before the first slash")
    kind: Literal["scalar", "layer"]
    ranks: list[int] = Field(description="ranks that have a series of their own; empty: only the merged one")
    num_points: int
    first_step: int | None
    last_step: int | None
    last: Number
    min: Number = Field(description="over finite values")
    max: Number = Field(description="over finite values")
    num_nonfinite: int


class MetricList(_Answer):
    """All metrics of a run."""

    metrics: list[Metric]


class LayerMap(_Answer):
    """Layers x steps of one statistic."""

    statistic: Statistic
    layers: list[str] = Field(description="depth order, input side first")
    bucket_width: int
    steps: list[int] = Field(description="first step of each column")
    reduce: Literal["max", "min", "mean"] = Field(
        default="max", description="what of its values a cell shows"
    )
    values: list[list[Number]] = Field(
        description="per layer, per column: the maximum (or `reduce`) over finite values; null: absent"
    )
    nonfinite: list[tuple[int, int, int]] = Field(description="[layer index, column index, count]")
    first_step: int | None
    last_step: int | None


class RingPart(_Answer):
    """Steps that one rank sent for one reason."""

    trigger_step: int | None = Field(description="the step that they were sent for")
    reason: str
    first_step: int
    last_step: int
    num_steps: int


class RingRank(_Answer):
    """What one rank of one attempt sent."""

    attempt: int = Field(description="ordinal from 1")
    rank: int
    first_step: int
    last_step: int
    parts: list[RingPart]


class RingOverview(_Answer):
    """Ranks that sent their last steps in full detail, newest attempt first."""

    ranks: list[RingRank]


class HistogramStep(_Answer):
    """A step of which histograms were taken."""

    attempt: int = Field(description="ordinal from 1")
    step: int
    ranks: list[int] = Field(description="that sent theirs of this step")
    reasons: list[str] = Field(description="what they were taken for, in words")
    trigger_steps: list[int] = Field(description="the steps that they were taken for, if any is known")


class HistogramOverview(_Answer):
    """Steps of which histograms were taken, newest first."""

    histograms: list[HistogramStep]


class LayerHistogram(_Answer):
    """One layer's gradient."""

    name: str
    numel: int = Field(description="elements of the whole layer")
    counted: int = Field(
        description="elements in the counts; fewer than numel: not all ranks sent theirs, 0: there was no gradient"
    )
    counts: list[int] = Field(description="elements per bin")


class LayerHistograms(HistogramStep):
    """Histograms of log2 magnitude of one step: merged over the ranks that sent theirs, or of one rank."""

    rank: int | None = Field(description="null: merged over ranks")
    edges: list[float] = Field(
        description="bin b of the finite elements goes from edges[b] up to, but without, edges[b + 1]; the last bin "
        "counts those that are not finite, and the first one zeros too"
    )
    layers: list[LayerHistogram] = Field(description="depth order, input side first")


class CommandRequest(Request):
    """Something that the agents of a run are to do."""

    kind: Literal["histogram"] = Field(description="histogram: take one of every layer's gradient, once")
    rank: int | None = Field(default=None, ge=0, description="null: every rank")
    reason: str = Field(default="", max_length=200, description="kept with what they send")


class CommandAnswer(_Answer):
    """A command is on its way to agents that are connected; what they send will show in time."""

    id: str
    kind: str
    asked: int = Field(description="ranks that were asked")
    ranks: list[int]
    step: int | None = Field(
        description="the step that it is to be carried out at, the same for all ranks; null: the next one of each"
    )


class LayerFlow(_Answer):
    """All statistics by depth at one step."""

    step: int | None = Field(description="the last step with layer statistics at or before the one asked for")
    layers: list[str]
    statistics: dict[str, list[Number]]
    measured_at: dict[str, int | None] = Field(
        description="statistic -> the step that its values are of: norms are read in every step, others perhaps less often"
    )


class Alert(_Answer):
    """One episode: opened, extended, resolved."""

    id: str
    run: str
    attempt: int
    rule: str
    rule_version: int
    severity: Severity
    state: Literal["firing", "resolved"]
    metric: str = Field(description="the metric to draw it on")
    title: str
    explanation: str
    advice: str
    first_step: int
    last_step: int
    opened_s: float
    resolved_s: float | None
    resolved_step: int | None
    count: int = Field(description="evaluations that found it")
    value: Number = Field(description="what was seen first")
    worst_value: Number
    baseline: Number
    threshold: Number
    layer: str | None = Field(description="the likely origin")
    layers: list[str]
    num_layers: int
    rank: int | None
    ranks: list[int]
    origin: str = Field(
        description="how the first layer was found: `forward`, `backward`, `growth`, or empty"
    )
    facts: list[str]


class AlertList(_Answer):
    """Alerts, newest first."""

    alerts: list[Alert]
    next_cursor: str | None = Field(
        description="hand this back as `cursor` for the next page; null: the last one"
    )


class Health(_Answer):
    """The process lives."""

    status: Literal["ok"]
    version: str


class Readiness(_Answer):
    """The database answers and is at this program's revision."""

    status: Literal["ready"]
    revision: str
    ingest: dict[str, int] = Field(
        description="what agents got wrong since the process started, by code; `repeated_record` is usual"
    )
