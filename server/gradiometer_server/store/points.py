"""Exact points of one line, page by page: for export, and for readers that follow a run.

Shape letters: N points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection

from gradiometer_server.domain.names import TIME
from gradiometer_server.domain.series import Tail
from gradiometer_server.errors import Conflict, InvalidRequest
from gradiometer_server.store.charts import no_such_metric
from gradiometer_server.store.database import Database
from gradiometer_server.store.fetching import Wish, fetch_all, fetch_steps, overview
from gradiometer_server.store.lines import Line, LineRef, find_lines
from gradiometer_server.store.pieces import Fetched, Piece, decode_steps, points_of

MAX_STEP: Final = 2**53 - 1

Tails = Callable[[int], Mapping[int, Tail]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Neighbouring points, rising: steps (N,), values (N,), times in Unix seconds (N,; NaN: not known).

    Attributes:
        total: points in the whole range that was asked for, on all pages together.
        more: whether points follow.
    """

    steps_N: NDArray[np.int64]
    values_N: NDArray[np.float64]
    times_N: NDArray[np.float64]
    total: int
    more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a reader has come: the last step, the attempt it is of, and how many points there were up to it."""

    attempt: int
    step: int
    count: int

    def __str__(self) -> str:
        return f"{self.attempt}.{self.step}.{self.count}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Inverse of `str`. Raises `InvalidRequest`."""
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 17 for part in parts):
            raise InvalidRequest(
                f"the cursor {text[:50]!r} was not given out by this server.",
                field="cursor",
                remedy="Ask without a cursor first.",
            )
        attempt, step, count = map(int, parts)
        return cls(attempt=attempt, step=step, count=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is new since a cursor: steps and values (N,), the next cursor (None: there are no points at all).

    Attributes:
        more: whether more than the limit was new.
        reset: what the reader has is no longer true, because a point came late or a newer attempt took over; these are
            the newest points again.
    """

    steps_N: NDArray[np.int64]
    values_N: NDArray[np.float64]
    cursor: Cursor | None
    more: bool
    reset: bool


class PointReader:
    """Reads points bit for bit. Thread-safe; holds nothing between calls."""

    def __init__(self, database: Database, tails: Tails) -> None:
        self._database, self._tails = database, tails

    def page(
        self, ref: LineRef, *, first: int, last: int, begin: int, limit: int, times: bool = True
    ) -> Page:
        """At most `limit` points of first..last (inclusive) from step `begin` on.

        Raises:
            NotFound: there is no such metric.
            InvalidRequest: it is a layer statistic.
            Conflict: points of that range were dropped to save space.
            CorruptData, StoreUnavailable.
        """
        time_ref = LineRef(run_key=ref.run_key, key=TIME, attempt=ref.attempt)
        refs = [ref, time_ref] if times else [ref]
        tails = {ref.run_key: self._tails(ref.run_key)}
        with self._database.read() as conn:
            found = find_lines(conn, refs, tails)
            line = _scalar(found[0], ref)
            total = _count(conn, line.pieces, first, last)
            fetched, end = _from(conn, line.pieces, max(first, begin), last, limit)
            beside: list[Fetched] = []
            for clock in found[1] if times else ():
                wishes = [
                    Wish(piece=piece, first=max(first, begin), last=end, width=0) for piece in clock.pieces
                ]
                beside = fetch_all(conn, wishes)
        steps_N, values_N = _joined(fetched)
        more = len(steps_N) > limit or end < min(last, _last_step(line.pieces))
        steps_N, values_N = steps_N[:limit], values_N[:limit]
        return Page(
            steps_N=steps_N,
            values_N=values_N,
            times_N=_at(steps_N, beside),
            total=total,
            more=more,
        )

    def news(self, ref: LineRef, cursor: Cursor | None, limit: int) -> News:
        """At most `limit` points after the cursor; None: the newest ones. Raises as `page`."""
        tails = {ref.run_key: self._tails(ref.run_key)}
        with self._database.read() as conn:
            line = _scalar(find_lines(conn, [ref], tails)[0], ref)
            reset = cursor is not None and not _holds(conn, line, cursor)
            if cursor is None or reset:
                fetched, end = _newest(conn, line.pieces, limit), MAX_STEP
            else:
                fetched, end = _from(conn, line.pieces, cursor.step + 1, MAX_STEP, limit)
            steps_N, values_N = _joined(fetched)
            is_newest = cursor is None or reset
            steps_N, values_N, left = _cut(steps_N, values_N, limit, from_end=is_newest)
            following = cursor
            if len(steps_N):
                count = (
                    cursor.count + len(steps_N)
                    if cursor is not None and not reset
                    else _count(conn, line.pieces, 0, int(steps_N[-1]))
                )
                at = int(steps_N[-1])
                following = Cursor(attempt=_attempt_at(line.pieces, at), step=at, count=count)
            elif reset:
                following = None
        more = not is_newest and (left or end < _last_step(line.pieces))
        return News(steps_N=steps_N, values_N=values_N, cursor=following, more=more, reset=reset)


def _scalar(lines: Sequence[Line], ref: LineRef) -> Line:
    if not lines:
        raise no_such_metric(ref)
    if lines[0].pieces[0].row.series.kind != "scalar":
        raise InvalidRequest(f"{ref.key!r} is a layer statistic.", remedy="Ask /runs/{run}/layers for it.")
    return lines[0]


def _holds(conn: Connection, line: Line, cursor: Cursor) -> bool:
    """Whether what lies up to the cursor is still what it was."""
    return (
        _attempt_at(line.pieces, cursor.step) == cursor.attempt
        and _count(conn, line.pieces, 0, cursor.step) == cursor.count
    )


def _attempt_at(pieces: Iterable[Piece], step: int) -> int:
    """The attempt whose point is the last one up to a step; 0: there is none."""
    begun = [(piece.first_step, piece) for piece in pieces if piece.first_step is not None]
    before = [(first, piece.row.series.attempt) for first, piece in begun if first <= step]
    return max(before, default=(0, 0))[1]


def _last_step(pieces: Iterable[Piece]) -> int:
    return max((step for piece in pieces if (step := piece.last_step) is not None), default=-1)


def _count(conn: Connection, pieces: Sequence[Piece], first: int, last: int) -> int:
    """Exactly how many points there are; most chunks are counted without reading their steps."""
    wishes = [Wish(piece=piece, first=first, last=last, width=0) for piece in pieces]
    total = 0
    unsure: list[Wish] = []
    for wish, rows in zip(wishes, overview(conn, wishes), strict=True):
        end = last if wish.piece.end is None else min(last, wish.piece.end)
        tail_N = wish.piece.steps_N
        for row in rows:
            below, above = np.searchsorted(tail_N, [row.step0, row.step1 + 1])
            if row.step0 >= first and row.step1 <= end and below == above:
                total += row.n
            elif row.num_bytes or row.stride:
                unsure.append(Wish(piece=wish.piece, first=row.step0, last=row.step0, width=0))
            else:
                # Their steps are gone with them.
                refuse_thinned(fetch_all(conn, [wish]))
        inside_N = tail_N[(tail_N >= first) & (tail_N <= end)]
        read = fetch_steps(conn, unsure)
        steps = [decode_steps(row, wish.piece.row.series) for some in read for row in some]
        clipped = [some[(some >= first) & (some <= end)] for some in steps]
        total += len(np.unique(np.concatenate([inside_N, *clipped])))
        unsure.clear()
    return total


def _from(
    conn: Connection, pieces: Sequence[Piece], first: int, last: int, limit: int
) -> tuple[list[Fetched], int]:
    """Rows that hold more than `limit` points from `first` on, if there are so many, and the step they reach to."""
    wishes = [Wish(piece=piece, first=first, last=last, width=0) for piece in pieces]
    end, seen = last, 0
    for row in sorted((row for some in overview(conn, wishes) for row in some), key=lambda row: row.step0):
        seen += row.n if row.step0 >= first else 0
        if seen > limit:
            end = min(last, row.step1)
            break
    return _exact(conn, pieces, first, end), end


def _newest(conn: Connection, pieces: Sequence[Piece], limit: int) -> list[Fetched]:
    """Rows that hold the last `limit` points."""
    wishes = [Wish(piece=piece, first=0, last=MAX_STEP, width=0) for piece in pieces]
    first, seen = 0, 0
    rows = [
        (row, piece)
        for piece, some in zip(pieces, overview(conn, wishes), strict=True)
        for row in some
        if piece.end is None or row.step1 <= piece.end
    ]
    for row, _ in sorted(rows, key=lambda one: -int(one[0].step0)):
        seen += row.n
        if seen >= limit:
            first = row.step0
            break
    return _exact(conn, pieces, first, MAX_STEP)


def _exact(conn: Connection, pieces: Sequence[Piece], first: int, last: int) -> list[Fetched]:
    fetched = fetch_all(conn, [Wish(piece=piece, first=first, last=last, width=0) for piece in pieces])
    refuse_thinned(fetched)
    return fetched


def refuse_thinned(fetched: Iterable[Fetched]) -> None:
    """Raises `Conflict` where some of the points that were asked for are no longer there."""
    if any(one.summaries for one in fetched):
        raise Conflict(
            "raw points of that range were dropped to save space; their extremes and counts are kept.",
            code="points_dropped",
            remedy="Ask /series/query for buckets, or for a later range.",
        )


def _joined(fetched: Sequence[Fetched]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    decoded = [points_of(one) for one in fetched]
    steps_N = np.concatenate([np.empty(0, np.int64), *(steps for steps, _ in decoded)])
    values_N = np.concatenate([np.empty(0), *(values[:, 0] for _, values in decoded)])
    order = np.argsort(steps_N, kind="stable")
    return steps_N[order], values_N[order]


def _cut(
    steps_N: NDArray[np.int64], values_N: NDArray[np.float64], limit: int, *, from_end: bool
) -> tuple[NDArray[Any], NDArray[np.float64], bool]:
    left = len(steps_N) > limit
    kept = slice(-limit, None) if from_end else slice(limit)
    return steps_N[kept], values_N[kept], left


def _at(steps_N: NDArray[np.int64], beside: Sequence[Fetched]) -> NDArray[np.float64]:
    """Values of another line at exactly these steps; NaN where it has none."""
    known_N, x_N = _joined(beside)
    found_N = np.full(len(steps_N), np.nan)
    if len(known_N):
        at_N = np.minimum(np.searchsorted(known_N, steps_N), len(known_N) - 1)
        same_N = known_N[at_N] == steps_N
        found_N[same_N] = x_N[at_N[same_N]]
    return found_N
