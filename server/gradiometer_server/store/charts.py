"""What charts draw: any number of lines over one axis, each by itself or folded with others, from a few reads.

Lines are read in batches that bound memory, each batch in one short snapshot, and decoded after it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gradiometer_server.domain.series import Tail
from gradiometer_server.errors import GradiometerError, InvalidRequest, NotFound
from gradiometer_server.store.database import Database
from gradiometer_server.store.drawing import Chart, Drawn, Job, Owner, Reading, draw, read
from gradiometer_server.store.lines import Line, LineRef, find_lines

MAX_LINES: Final = 2000
"""Most lines of one request, ranks counted one by one."""
_BATCH_POINTS: Final = 4_000_000
_POINTS_PER_BUCKET: Final = 16
_EDGES: Final = 8192
"""Points of the two chunks that a range cuts."""

Tails = Callable[[int], Mapping[int, Tail]]
"""Run key -> series id -> points that are folded but not flushed; an immutable snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One thing to draw: the lines of one ref, or of several folded into one (`is_folded`)."""

    refs: tuple[LineRef, ...]
    is_folded: bool = False


class ChartReader:
    """Draws. Thread-safe; holds nothing between calls."""

    def __init__(self, database: Database, tails: Tails) -> None:
        self._database, self._tails = database, tails

    def draw(self, wanted: Sequence[Wanted], chart: Chart) -> Iterator[list[Drawn]]:
        """Each wanted thing in turn: one drawn line, or one for each rank if its ref says `EVERY` and is not folded.

        What is wrong with one of them is its `error`.

        Raises:
            InvalidRequest: a range that ends before it begins, or more than `MAX_LINES` lines.
            StoreUnavailable: the database does not answer.
        """
        if chart.first is not None and chart.last is not None and chart.first > chart.last:
            raise InvalidRequest(
                f"the range begins at {chart.first:.17g} but ends at {chart.last:.17g}.",
                field="from",
                remedy="Give a beginning that is not beyond the end.",
            )
        return self._draw_all(self._jobs(wanted, chart), chart)

    def _jobs(self, wanted: Sequence[Wanted], chart: Chart) -> list[list[Job | Drawn]]:
        refs = [ref for one in wanted for ref in one.refs]
        axes = [axis for ref in refs if (axis := chart.axis_of(ref)) is not None]
        unique = list(dict.fromkeys([*refs, *axes]))
        tails = {key: self._tails(key) for key in {ref.run_key for ref in unique}}
        with self._database.read() as conn:
            found = dict(zip(unique, find_lines(conn, unique, tails), strict=True))
        if sum(len(found[ref]) for ref in refs) > MAX_LINES:
            raise InvalidRequest(
                f"more than {MAX_LINES} lines were asked for, ranks counted one by one.",
                field="series",
                remedy="Ask for fewer runs, metrics or ranks at a time.",
            )
        return [_jobs_of(one, chart, found) for one in wanted]

    def _draw_all(self, jobs: Sequence[list[Job | Drawn]], chart: Chart) -> Iterator[list[Drawn]]:
        for batch in _batches(jobs, chart):
            to_read = [job for some in batch for job in some if isinstance(job, Job)]
            with self._database.read() as conn:
                readings = iter(read(conn, to_read, chart))
            for some in batch:
                yield [job if isinstance(job, Drawn) else _drawn(job, next(readings), chart) for job in some]


def _drawn(job: Job, reading: Reading, chart: Chart) -> Drawn:
    try:
        return draw(job, reading, chart)
    except GradiometerError as error:
        return Drawn(owners=job.owners, error=error)


def _jobs_of(wanted: Wanted, chart: Chart, found: Mapping[LineRef, Sequence[Line]]) -> list[Job | Drawn]:
    lines = [
        (Owner(place=place, rank=line.rank), line, chart.axis_of(ref))
        for place, ref in enumerate(wanted.refs)
        for line in found[ref]
    ]
    if not lines:
        ref = wanted.refs[0]
        rank = ref.rank if isinstance(ref.rank, int) else None
        error = no_such_metric(ref)
        return [Drawn(owners=(Owner(place=0, rank=rank),), error=error)]
    groups = [lines] if wanted.is_folded else [[one] for one in lines]
    return [
        Job(
            owners=tuple(owner for owner, _, _ in group),
            lines=tuple(line for _, line, _ in group),
            axes=tuple(next(iter(found[axis]), None) for _, _, axis in group if axis is not None),
            is_folded=wanted.is_folded,
        )
        for group in groups
    ]


def no_such_metric(ref: LineRef) -> NotFound:
    """There is no such series."""
    where = (("rank", ref.rank), ("attempt", ref.attempt))
    named = "".join(f" of {what} {number}" for what, number in where if isinstance(number, int))
    return NotFound("metric", ref.key + named)


def _batches(jobs: Sequence[list[Job | Drawn]], chart: Chart) -> Iterator[list[list[Job | Drawn]]]:
    """Neighbours together, as long as what they read fits into memory."""
    batch: list[list[Job | Drawn]] = []
    total = 0
    for some in jobs:
        cost = sum(_cost(job, chart) for job in some if isinstance(job, Job))
        if batch and total + cost > _BATCH_POINTS:
            yield batch
            batch, total = [], 0
        batch.append(some)
        total += cost
    if batch:
        yield batch


def _cost(job: Job, chart: Chart) -> int:
    """About how many points are decoded."""
    points = [line.num_points for line in (*job.lines, *job.axes) if line is not None]
    if chart.needs_all_points:
        return sum(points)
    return sum(min(num, _POINTS_PER_BUCKET * chart.buckets + _EDGES) for num in points)
