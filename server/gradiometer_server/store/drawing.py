"""Draws lines: what to read of each in the snapshot, and how it becomes buckets on the axis afterwards.

Shape letters: N points, B buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

from gradiometer_server.domain.names import TIME
from gradiometer_server.domain.series import Buckets
from gradiometer_server.errors import GradiometerError, InvalidRequest, NotFound
from gradiometer_server.store.axes import axis_ranges, known_x
from gradiometer_server.store.fetching import Wish, fetch_all, widest
from gradiometer_server.store.lines import Line, LineRef
from gradiometer_server.store.pieces import Fetched, Windows, extent, points_of, windows_with_ends
from gradiometer_server.summaries import axis as axes
from gradiometer_server.summaries import buckets as bucketing
from gradiometer_server.summaries.combine import Combined, Member, combine
from gradiometer_server.summaries.known_x import KnownX
from gradiometer_server.summaries.selection import display_width
from gradiometer_server.summaries.smoothing import debiased_ema, lead_in

MAX_STEP: Final = 2**53 - 1
AxisKind = Literal["step", "time", "relative_time", "metric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """How lines are drawn.

    Attributes:
        axis: what lies along x.
        metric: the name of the x metric, if it is one.
        first, last: range in units of the axis, inclusive; None: all.
        buckets: at most so many.
        smoothing: weight of the debiased moving average, see `summaries/smoothing.py`; None: none.
    """

    axis: AxisKind = "step"
    metric: str | None = None
    first: float | None = None
    last: float | None = None
    buckets: int = 1000
    smoothing: float | None = None

    def axis_of(self, ref: LineRef) -> LineRef | None:
        """The line of x that belongs to a line; None: it is the step itself."""
        if self.axis == "step":
            return None
        key = self.metric if self.axis == "metric" and self.metric is not None else TIME
        return LineRef(run_key=ref.run_key, key=key, attempt=ref.attempt)

    def origin(self, line: Line) -> float:
        """What is taken off each x."""
        return line.began_s if self.axis == "relative_time" else 0.0

    @property
    def needs_all_points(self) -> bool:
        """Whether summaries cannot do."""
        return self.axis != "step" or self.smoothing is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose points a drawn line has: place of its ref in `Wanted.refs`, and its rank."""

    place: int
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Lines to draw, folded into one or a single one; `axes`: the lines of x beside them, if x is not the step."""

    owners: tuple[Owner, ...]
    lines: tuple[Line, ...]
    axes: tuple[Line | None, ...]
    is_folded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What was read for a job: per line, and per line of x. `width`: of the buckets, if x is the step."""

    lines: tuple[tuple[Fetched, ...], ...]
    axes: tuple[tuple[Fetched, ...], ...]
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A line as buckets (B, 1), or an `error` instead.

    Attributes:
        owners: whose points these are; several if they are folded.
        width: of a bucket on the axis; 1 on steps and 0 on others: the points as they are.
        first_step, last_step: of the whole line.
        first_x, last_x: of the whole axis; None on steps.
        x_B: x of the earliest step in the bucket; None on steps.
        smoothed_B: mean of the smoothed values in the bucket, NaN without any; None: not asked for.
        combined: of folded lines, who is in each bucket.
    """

    owners: tuple[Owner, ...]
    width: float = 1
    first_step: int | None = None
    last_step: int | None = None
    first_x: float | None = None
    last_x: float | None = None
    x_B: NDArray[np.float64] | None = None
    smoothed_B: NDArray[np.float64] | None = None
    buckets: Buckets | None = None
    combined: Combined | None = None
    error: GradiometerError | None = None


def read(conn: Connection, jobs: Sequence[Job], chart: Chart) -> list[Reading]:
    """Everything that the jobs need, in this snapshot."""
    planned = [_on_steps(job, chart) for job in jobs] if chart.axis == "step" else _on_axes(conn, jobs, chart)
    wishes = [wish for _, lines in planned for some in lines for wish in some]
    fetched = iter(fetch_all(conn, wishes))
    readings = []
    for job, (width, lines) in zip(jobs, planned, strict=True):
        found = [tuple(next(fetched) for _ in some) for some in lines]
        num = len(job.lines)
        readings.append(Reading(lines=tuple(found[:num]), axes=tuple(found[num:]), width=width))
    return readings


_Plan = tuple[int, list[list[Wish]]]
"""Width of a bucket in steps, and the wishes of each line, then of each line of x."""


def _on_steps(job: Job, chart: Chart) -> _Plan:
    begin, end = extent([piece for line in job.lines for piece in line.pieces])
    if begin is None or end is None:
        return 1, [[] for _ in job.lines]
    low = begin if chart.first is None else max(begin, int(chart.first))
    high = end if chart.last is None else min(end, int(chart.last))
    if low > high:
        return 1, [[] for _ in job.lines]
    width = display_width(low, high, chart.buckets)
    lead = 0 if chart.smoothing is None else lead_in(chart.smoothing)
    fit = chart.buckets if width > 1 and not job.is_folded else 0
    wished = 0 if chart.smoothing is not None else width
    return width, [
        [Wish(piece=piece, first=low, last=high, width=wished, lead=lead, fit=fit) for piece in line.pieces]
        for line in job.lines
    ]


def _on_axes(conn: Connection, jobs: Sequence[Job], chart: Chart) -> list[_Plan]:
    lead = 0 if chart.smoothing is None else lead_in(chart.smoothing)
    pairs = [(line, axis) for job in jobs for line, axis in zip(job.lines, job.axes, strict=True)]
    ranges = iter(axis_ranges(conn, [(axis, *_bounds(line, chart)) for line, axis in pairs]))
    plans: list[_Plan] = []
    for job in jobs:
        of_lines, of_axes = [], []
        for line, axis in zip(job.lines, job.axes, strict=True):
            found = next(ranges)
            pieces, beside = ((), ()) if found is None or axis is None else (line.pieces, axis.pieces)
            first, last, known = (0, -1, 0) if found is None else (found.first, found.last, found.known_from)
            of_lines.append([Wish(piece=one, first=first, last=last, width=0, lead=lead) for one in pieces])
            of_axes.append([Wish(piece=one, first=known, last=last, width=0) for one in beside])
        plans.append((1, of_lines + of_axes))
    return plans


def _bounds(line: Line, chart: Chart) -> tuple[float | None, float | None]:
    """The range in the values of the axis' own metric, a little wider: adding the origin rounds."""
    origin = chart.origin(line)
    low = None if chart.first is None else chart.first + origin - _slack(chart.first, origin)
    high = None if chart.last is None else chart.last + origin + _slack(chart.last, origin)
    return low, high


def _slack(end: float, origin: float) -> float:
    return 4 * math.ulp(max(abs(end), abs(origin))) if origin else 0.0


def draw(job: Job, reading: Reading, chart: Chart) -> Drawn:
    """Buckets of a job.

    Raises:
        InvalidRequest: it is a layer statistic.
        NotFound: nothing is known of x.
        CorruptData: a chunk is damaged.
    """
    for line in job.lines:
        if any(piece.row.series.width != 1 or piece.row.series.kind != "scalar" for piece in line.pieces):
            raise InvalidRequest(
                f"{line.ref.key!r} is a layer statistic.", remedy="Ask /runs/{run}/layers for it."
            )
    return _draw_on_steps(job, reading, chart) if chart.axis == "step" else _draw_on_axis(job, reading, chart)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Points:
    """The points of a line inside the range, windows of chunks beside them, smoothed values (N,) if asked for."""

    steps_N: NDArray[np.int64]
    values_N1: NDArray[np.float64]
    smoothed_N: NDArray[np.float64] | None
    windows: Sequence[Windows]


def _points(fetched: Sequence[Fetched], chart: Chart) -> _Points:
    decoded = [points_of(one, lead_in=chart.smoothing is not None) for one in fetched]
    if len(decoded) == 1:
        steps_N, values_N1 = decoded[0]
    elif decoded:
        # Attempts do not overlap once cut; sorted, because a late launch may lie before an earlier one.
        steps_N = np.concatenate([steps for steps, _ in decoded])
        order = np.argsort(steps_N, kind="stable")
        steps_N, values_N1 = steps_N[order], np.concatenate([values for _, values in decoded])[order]
    else:
        steps_N, values_N1 = np.empty(0, np.int64), np.empty((0, 1))
    windows = [part for one in fetched for part in windows_with_ends(one)]
    if chart.smoothing is None or not decoded:
        return _Points(steps_N=steps_N, values_N1=values_N1, smoothed_N=None, windows=windows)
    smoothed_N = debiased_ema(values_N1[:, 0], chart.smoothing)
    begin = int(np.searchsorted(steps_N, fetched[0].first))
    return _Points(
        steps_N=steps_N[begin:], values_N1=values_N1[begin:], smoothed_N=smoothed_N[begin:], windows=windows
    )


def _draw_on_steps(job: Job, reading: Reading, chart: Chart) -> Drawn:
    points = [_points(some, chart) for some in reading.lines]
    width = reading.width
    if len(points) == 1 and not job.is_folded and _fits(points[0], chart):
        width = 1
    width = max(width, *(widest(some) for some in reading.lines))
    members = [_member_on_steps(one, width, chart) for one in points]
    first, last = extent([piece for line in job.lines for piece in line.pieces])
    return _finish(job, members, Drawn(owners=job.owners, width=width, first_step=first, last_step=last))


def _fits(points: _Points, chart: Chart) -> bool:
    return not points.windows and len(points.steps_N) <= chart.buckets


def _member_on_steps(points: _Points, width: int, chart: Chart) -> Member:
    own = bucketing.bucketise(points.steps_N, points.values_N1, width)
    parts = [part for part in (own, *(one.buckets for one in points.windows)) if len(part.first_step_B)]
    found = bucketing.merge(parts, width) if parts else own
    place_B = found.first_step_B // width
    smoothed_B = None
    if chart.smoothing is not None:
        smoothed_B = np.full(len(place_B), np.nan)
        if points.smoothed_N is not None and len(points.steps_N):
            mean_B = bucketing.bucketise(points.steps_N, points.smoothed_N[:, None], width).mean_BW[:, 0]
            smoothed_B[np.searchsorted(place_B, own.first_step_B // width)] = mean_B
    x_B = found.first_step_B.astype(np.float64)
    return Member(place_B=place_B.astype(np.float64), x_B=x_B, smoothed_B=smoothed_B, buckets=found)


def _draw_on_axis(job: Job, reading: Reading, chart: Chart) -> Drawn:
    placed = [
        _place(line, lines, beside, chart)
        for line, lines, beside in zip(job.lines, reading.lines, reading.axes, strict=True)
    ]
    _check_axes(job, chart)
    x_N = np.concatenate([one.x_N for one in placed])
    width = 0.0
    if len(x_N) and (job.is_folded or len(x_N) > chart.buckets):
        width = axes.axis_width(float(x_N.min()), float(x_N.max()), chart.buckets)
    members = [_member_on_axis(one, width, chart) for one in placed]
    first, last = extent([piece for line in job.lines for piece in line.pieces])
    low, high = _axis_extent(job, chart)
    blank = Drawn(owners=job.owners, width=width, first_step=first, last_step=last, first_x=low, last_x=high)
    return _finish(job, members, blank)


def _check_axes(job: Job, chart: Chart) -> None:
    if _axis_extent(job, chart) == (None, None):
        what = chart.metric if chart.axis == "metric" else "times"
        raise NotFound("x axis", str(what), remedy="Draw it over steps, or over a metric that this run has.")


def _axis_extent(job: Job, chart: Chart) -> tuple[float | None, float | None]:
    lows, highs = [], []
    for line, axis in zip(job.lines, job.axes, strict=True):
        origin = chart.origin(line)
        for piece in axis.pieces if axis is not None else ():
            finite = piece.values_NW[np.isfinite(piece.values_NW)].tolist()
            known = [x - origin for x in (piece.row.min, piece.row.max, *finite) if x is not None]
            if known:
                lows.append(min(known))
                highs.append(max(known))
    return min(lows, default=None), max(highs, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """Points of a line with their x, by rising step; `rows` in their place where some of them are windows."""

    points: _Points
    x_N: NDArray[np.float64]
    rows: Buckets | None


def _place(line: Line, lines: Sequence[Fetched], beside: Sequence[Fetched], chart: Chart) -> _Placed:
    points = _points(lines, chart)
    known = known_x(beside)
    if points.windows or any(one.summaries for one in beside):
        return _place_windows(points, known, chart.origin(line), chart)
    x_N = known.at(points.steps_N) - chart.origin(line)
    inside_N = ~np.isnan(x_N)
    if chart.first is not None:
        inside_N &= x_N >= chart.first
    if chart.last is not None:
        inside_N &= x_N <= chart.last
    smoothed_N = points.smoothed_N
    kept = _Points(
        steps_N=points.steps_N[inside_N],
        values_N1=points.values_N1[inside_N],
        smoothed_N=None if smoothed_N is None else smoothed_N[inside_N],
        windows=(),
    )
    return _Placed(points=kept, x_N=x_N[inside_N], rows=None)


def _place_windows(points: _Points, known: KnownX, origin: float, chart: Chart) -> _Placed:
    """Points and windows whose steps may have an x in the range, each at the x in the range nearest to its first step's."""
    own = bucketing.bucketise(points.steps_N, points.values_N1, 1)
    rows = bucketing.merge([own, *(one.buckets for one in points.windows)], 1)
    begin_B, last_B = rows.first_step_B, rows.first_step_B.copy()
    for one in points.windows:
        np.maximum.at(last_B, np.searchsorted(begin_B, one.buckets.first_step_B), one.last_B)
    low_B, high_B = (ends - origin for ends in known.between(begin_B, last_B))
    if chart.first is not None:
        low_B = np.maximum(low_B, chart.first)
    if chart.last is not None:
        high_B = np.minimum(high_B, chart.last)
    inside = np.flatnonzero(low_B <= high_B)
    x_B = np.clip((known.at(begin_B) - origin)[inside], low_B[inside], high_B[inside])
    rows, smoothed_B = bucketing.reordered(rows, inside), None
    if points.smoothed_N is not None:
        smoothed_B = np.full(len(begin_B), np.nan)
        smoothed_B[np.searchsorted(begin_B, points.steps_N)] = points.smoothed_N
        smoothed_B = smoothed_B[inside]
    kept = _Points(steps_N=rows.first_step_B, values_N1=rows.mean_BW, smoothed_N=smoothed_B, windows=())
    return _Placed(points=kept, x_N=x_B, rows=rows)


def _member_on_axis(placed: _Placed, width: float, chart: Chart) -> Member:
    points = placed.points
    if placed.rows is not None:
        found = axes.rows_by_axis(placed.rows, placed.x_N, width)
    else:
        found = axes.by_axis(points.steps_N, points.values_N1, placed.x_N, width)
    smoothed_B = None
    if chart.smoothing is not None:
        smoothed_B = np.full(len(found.place_B), np.nan)
        if points.smoothed_N is not None:
            smooth = axes.by_axis(points.steps_N, points.smoothed_N[:, None], placed.x_N, width)
            smoothed_B = smooth.buckets.mean_BW[:, 0]
    return Member(place_B=found.place_B, x_B=found.x_B, smoothed_B=smoothed_B, buckets=found.buckets)


def _finish(job: Job, members: Sequence[Member], blank: Drawn) -> Drawn:
    """The one member, or all of them folded, with what `blank` says of the line."""
    combined = combine(members, int(blank.width)) if job.is_folded else None
    one = members[0] if combined is None else combined
    is_axis = blank.first_x is not None
    return Drawn(
        owners=blank.owners, width=blank.width, first_step=blank.first_step, last_step=blank.last_step,
        first_x=blank.first_x, last_x=blank.last_x, x_B=one.x_B if is_axis else None, smoothed_B=one.smoothed_B,
        buckets=one.buckets, combined=combined,
    )  # fmt: skip
