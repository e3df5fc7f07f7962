"""What the routes about series take and answer; see `schemas.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gradiometer_server.api.schemas import MAX_STEP, MetricName, Number, Request, RunState

MAX_SERIES = 1000
MAX_BUCKETS = 5000
MAX_ALL_BUCKETS = 2_000_000
"""Of all series of a request together."""
MAX_POINTS = 100_000
MAX_SMOOTHING = 0.99999

RunName = Annotated[str, Field(min_length=1, max_length=128)]
Ranks = Literal["merged", "each", "band"]
Axis = Literal["step", "time", "relative_time", "metric"]


def _drawable(value: object) -> object:
    """A whole number beyond 2**53 as the float next to it: JSON's have any length, an axis has floats."""
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) <= MAX_STEP:
        return value
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("is beyond the largest number that there is on an axis, 1.8e308") from error


Bound = Annotated[int | float | None, BeforeValidator(_drawable)]


class _Request(Request):
    model_config = ConfigDict(populate_by_name=True, allow_inf_nan=False)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SeriesRef(_Request):
    """Which series to draw."""

    run: RunName = Field(description="run id")
    metric: MetricName
    rank: int | None = Field(default=None, ge=0, description="null: as `ranks` says")
    attempt: int | None = Field(
        default=None, ge=1, description="ordinal; null: the line over all of them, where the newest wins"
    )
    group: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="series of one metric with the same group are folded into one: mean, min and max over them",
    )


class SeriesQuery(_Request):
    """A batch of series over one range of one x axis."""

    series: list[SeriesRef] = Field(default=[], max_length=MAX_SERIES)
    runs: list[RunName] = Field(
        default=[], max_length=MAX_SERIES, description="with `metrics`: each of these runs"
    )
    metrics: list[MetricName] = Field(
        default=[], max_length=MAX_SERIES, description="with `runs`: each of these metrics"
    )
    group: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="the group of all of `runs`, one answer per metric",
    )
    ranks: Ranks = Field(
        default="merged",
        description="of series without a rank: merged over ranks, every rank by itself, or a band over all ranks",
    )
    x: Axis = Field(
        default="step",
        description="step; Unix time in s; seconds since the first attempt (or the one asked for) began; another metric",
    )
    x_metric: MetricName | None = Field(default=None, description="with `x: metric`: its name")
    from_: Bound = Field(default=None, alias="from", description="in units of x, inclusive")
    to: Bound = Field(default=None, description="in units of x, inclusive")
    buckets: int = Field(
        default=1000,
        ge=1,
        le=MAX_BUCKETS,
        description="at most this many per series; other x than steps: 4 or more",
    )
    smoothing: float | None = Field(
        default=None,
        ge=0,
        le=MAX_SMOOTHING,
        description="weight of a debiased exponential moving average over all points",
    )


class Points(_Answer):
    """Columns of equal length, one entry per bucket; mean, min and max are over finite values, null without any."""

    step: list[int] = Field(description="first step of the bucket that has a point")
    count: list[int] = Field(description="points with a finite value")
    mean: list[Number]
    min: list[Number]
    max: list[Number]
    nan: list[int] = Field(description="points that are NaN")
    pos_inf: list[int]
    neg_inf: list[int]
    x: list[Number] = Field(default=[], description="x of that step; only where x is not the step")
    smoothed: list[Number] = Field(
        default=[], description="mean of the smoothed values; only where asked for"
    )
    members: list[int] = Field(default=[], description="of a band or group: how many have a point here")
    min_member: list[int | None] = Field(
        default=[], description="index in `members` of one that holds the minimum"
    )
    max_member: list[int | None] = Field(
        default=[], description="index in `members` of one that holds the maximum"
    )


class Member(_Answer):
    """One of the series that are folded into one."""

    run: str
    rank: int | None


class SeriesAnswer(_Answer):
    """One series, as asked for and in the order asked for; a band or group where its first series was asked for."""

    run: str | None = Field(description="null: a group")
    metric: str
    rank: int | None
    group: str | None = Field(default=None, description="only of a group")
    members: list[Member] = Field(default=[], description="only of a band or group: who is in it")
    missing: list[Member] = Field(
        default=[],
        description="only of a group: who was asked for and is not in it, because the run or metric is unknown",
    )
    bucket_width: int | float = Field(
        description="steps per bucket, or of x; a power of two; 1 (for other x than steps: 0): raw points"
    )
    first_step: int | None = Field(description="of the whole series, not of the range")
    last_step: int | None
    first_x: Number = Field(default=None, description="of the whole axis; only where x is not the step")
    last_x: Number = None
    points: Points
    error: str | None = Field(default=None, description="why this series is empty, e.g. an unknown metric")


class SeriesAnswers(_Answer):
    """Answer to a `SeriesQuery`."""

    series: list[SeriesAnswer]


class RawPoints(_Answer):
    """Columns of equal length."""

    step: list[int]
    value: list[Number]
    time_s: list[Number] = Field(default=[], description="Unix seconds; null: not known")


class PointsPage(_Answer):
    """Exact points of one series, by rising step."""

    run: str
    metric: str
    rank: int | None
    total: int = Field(description="points in the whole range, on all pages together")
    points: RawPoints
    next_cursor: str | None = Field(
        description="hand this back as `cursor` for the next page; null: the last one"
    )


class TailRef(_Request):
    """A series to follow."""

    run: RunName
    metric: MetricName
    rank: int | None = Field(default=None, ge=0)
    cursor: str | None = Field(
        default=None, max_length=60, description="of the last answer; null: the newest points"
    )


class TailQuery(_Request):
    """What is new of some series."""

    series: list[TailRef] = Field(min_length=1, max_length=200)
    limit: int = Field(default=1000, ge=1, le=10_000, description="at most so many points of each")


class TailAnswer(_Answer):
    """Points after the cursor, by rising step."""

    run: str
    metric: str
    rank: int | None
    points: RawPoints
    cursor: str | None = Field(description="for the next request; null: there are no points yet")
    more: bool = Field(description="ask again at once: there was more than the limit")
    reset: bool = Field(
        description="forget what you have: a point came late or an attempt took over; these are the newest points"
    )
    error: str | None = None


class TailAnswers(_Answer):
    """Answer to a `TailQuery`."""

    series: list[TailAnswer]


class LatestRun(_Answer):
    """A run with the values that were asked for."""

    id: str
    name: str
    project: str
    state: RunState
    last_step: int | None
    values: dict[str, Number] = Field(
        description="of its newest attempt; what it does not measure is left out"
    )


class LatestList(_Answer):
    """A page of runs, newest first."""

    runs: list[LatestRun]
    next_cursor: str | None
