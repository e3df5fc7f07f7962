"""One attempt's part of a drawn line: what to fetch of it inside the snapshot, how to decode it afterwards.

Shape letters: N points, W width of a series.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, case, func, select

from gradiometer_server.domain.series import Buckets, Series, Tail
from gradiometer_server.store.series import SeriesRow
from gradiometer_server.store.tables import chunk
from gradiometer_server.summaries import buckets, codec
from gradiometer_server.summaries.partition import last_wins
from gradiometer_server.summaries.selection import StoredChunk, needs_points

_BATCH: Final = 1000
"""Most chunks named in one statement; SQLite allows 32,766 parameters."""

_OF_SERIES = (chunk.c.run_id == bindparam("of_run"), chunk.c.series_id == bindparam("of_series"))
_before = chunk.alias()
_FIRST = func.coalesce(
    select(func.max(_before.c.step0))
    .where(
        _before.c.run_id == bindparam("of_run"),
        _before.c.series_id == bindparam("of_series"),
        _before.c.step0 <= bindparam("first"),
    )
    .scalar_subquery(),
    bindparam("first"),
)
_OVERVIEW = (
    select(
        chunk.c.step0, chunk.c.step1, chunk.c.n, chunk.c.dtype, chunk.c.summary_width,
        case((chunk.c.summary_width <= bindparam("most_width"), chunk.c.summary)).label("summary"),
    )
    .where(*_OF_SERIES, chunk.c.step0 >= _FIRST, chunk.c.step0 <= bindparam("last"), chunk.c.step1 >= bindparam("first"))
    .order_by(chunk.c.step0)
)  # fmt: skip
_POINTS = (
    select(chunk.c.step0, chunk.c.n, chunk.c.stride, chunk.c.steps, chunk.c.data)
    .where(*_OF_SERIES, chunk.c.step0.in_(bindparam("begins", expanding=True)))
    .order_by(chunk.c.step0)
)
_LAST = (
    select(chunk.c.step0, chunk.c.n, chunk.c.stride, chunk.c.steps, chunk.c.data)
    .where(*_OF_SERIES, chunk.c.step0 <= bindparam("last"))
    .order_by(chunk.c.step0.desc())
    .limit(1)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A series of one attempt, its points that are not in chunks yet (rising, unique), and its last step to draw.

    `end` is the last step (inclusive) before a later attempt takes over; None: there is none.
    """

    row: SeriesRow
    steps_N: NDArray[np.int64]
    values_NW: NDArray[np.float64]
    end: int | None

    @property
    def first_step(self) -> int | None:
        """First step to draw, or None if nothing is left."""
        first = self.row.first_step
        if len(self.steps_N):
            begin = int(self.steps_N[0])
            first = begin if first is None else min(first, begin)
        return None if first is None or (self.end is not None and first > self.end) else first

    @property
    def last_step(self) -> int | None:
        """Last step to draw, or None if nothing is left. Where a later attempt cuts the line: at most this."""
        if self.first_step is None:
            return None
        last = self.row.last_step
        if len(self.steps_N):
            end = int(self.steps_N[-1])
            last = end if last is None else max(last, end)
        return last if last is None or self.end is None else min(last, self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Rows of one piece, read in the snapshot, not yet decoded."""

    piece: Piece
    first: int
    last: int
    summaries: Sequence[Any]
    blocks: Sequence[Any]


def make_piece(row: SeriesRow, tail: Tail | None, cut: int | None) -> Piece:
    """A piece of a series with its tail; `cut`: first step that a later attempt draws."""
    width = row.series.width
    steps, values = np.empty(0, np.int64), np.empty((0, width))
    if tail is not None and len(tail.steps_N):
        with np.errstate(invalid="ignore"):
            given = np.asarray(tail.values_NW, np.float64).reshape(-1, width)
        steps, values = last_wins(np.asarray(tail.steps_N, np.int64), given)
    return Piece(row=row, steps_N=steps, values_NW=values, end=None if cut is None else cut - 1)


def fetch(conn: Connection, piece: Piece, first: int, last: int, width: int) -> Fetched:
    """Read what buckets of `width` steps over first..last need: summaries where they suffice, else points."""
    if piece.end is not None:
        last = min(last, piece.end)
    find = _find(piece.row.series)
    rows = conn.execute(_OVERVIEW, {**find, "first": first, "last": last, "most_width": width}).all()
    summaries, begins = [], []
    for row in rows:
        stored = StoredChunk(step0=row.step0, step1=row.step1, n=row.n, summary_width=row.summary_width)
        if needs_points(stored, first=first, last=last, width=width, tail_steps_N=piece.steps_N):
            begins.append(row.step0)
        else:
            summaries.append(row)
    blocks = [row for some in _batches(begins) for row in conn.execute(_POINTS, {**find, "begins": some})]
    return Fetched(piece=piece, first=first, last=last, summaries=summaries, blocks=blocks)


def fetch_last(conn: Connection, piece: Piece, last: int) -> Fetched:
    """Read the chunk that holds the last step <= `last`."""
    if piece.end is not None:
        last = min(last, piece.end)
    blocks = conn.execute(_LAST, {**_find(piece.row.series), "last": last}).all()
    return Fetched(piece=piece, first=0, last=last, summaries=(), blocks=blocks)


def _find(series: Series) -> dict[str, Any]:
    return {"of_run": series.run_key, "of_series": series.series_id}


def _batches(begins: Sequence[int]) -> Iterator[Sequence[int]]:
    return (begins[at : at + _BATCH] for at in range(0, len(begins), _BATCH))


def points_of(fetched: Fetched) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Points in first..last of the fetched chunks and the tail, which wins. Raises `CorruptData`."""
    piece = fetched.piece
    decoded = [_decode(row, piece.row.series) for row in fetched.blocks]
    decoded.append((piece.steps_N, piece.values_NW))
    if len(decoded) == 1:
        steps, values = decoded[0]
    else:
        joined = np.concatenate([values for _, values in decoded])
        steps, values = last_wins(np.concatenate([steps for steps, _ in decoded]), joined)
    begin, end = np.searchsorted(steps, [fetched.first, fetched.last + 1])
    return steps[begin:end], values[begin:end]


def _decode(row: Any, series: Series) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    try:
        steps = codec.decode_steps(row.step0, row.stride, row.n, row.steps)
        return steps, codec.decode_values(row.data, row.n, series.width)
    except codec.CorruptData as error:
        raise _in_place(error, row, series) from error


def _in_place(error: codec.CorruptData, row: Any, series: Series) -> codec.CorruptData:
    return codec.CorruptData(
        f"{series.key}, attempt {series.attempt}, chunk at step {row.step0}: {error.reason}"
    )


def buckets_of(fetched: Fetched, width: int) -> list[Buckets]:
    """Buckets and finer windows of a piece, together covering first..last once. Raises `CorruptData`."""
    columns = fetched.piece.row.series.width
    parts = [buckets.bucketise(*points_of(fetched), width)]
    for dtype in ("f4", "f8"):
        rows = [row for row in fetched.summaries if row.dtype == dtype]
        if rows:
            parts.append(_windows(rows, columns, dtype, fetched.piece.row.series))
    return [part for part in parts if len(part.first_step_B)]


def _windows(rows: Sequence[Any], columns: int, dtype: str, series: Series) -> Buckets:
    width = max(row.summary_width for row in rows)
    try:
        return buckets.decode_summaries(
            [row.summary for row in rows], width=width, columns=columns, narrow=dtype == "f4"
        )
    except codec.CorruptData as error:
        raise _in_place(error, rows[0], series) from error


def extent(pieces: Sequence[Piece]) -> tuple[int | None, int | None]:
    """First and last step of a line made of these pieces; None if it has no points."""
    firsts = [step for piece in pieces if (step := piece.first_step) is not None]
    lasts = [step for piece in pieces if (step := piece.last_step) is not None]
    return min(firsts, default=None), max(lasts, default=None)
