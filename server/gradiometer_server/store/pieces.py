"""One attempt's part of a drawn line, and what was read of it: decoded to points, or to buckets.

Shape letters: N points, W width of a series.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.series import Buckets, Series, Tail
from gradiometer_server.store.series import SeriesRow
from gradiometer_server.summaries import buckets, codec
from gradiometer_server.summaries.partition import last_wins


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
    def num_known(self) -> int:
        """Points of the tail that its series' row counts already: tails are taken before the snapshot, see `query`.

        One of a step that was written before and another that was left out before look alike; both are taken for known.
        """
        last = self.row.last_step
        return 0 if last is None else int(np.searchsorted(self.steps_N, last, side="right"))

    @property
    def num_points(self) -> int:
        """Points of the series, those included that are not in chunks yet."""
        return self.row.num_points + len(self.steps_N) - self.num_known

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
    """Rows of one piece, read in a snapshot, not yet decoded.

    Attributes:
        first, last: the range that was asked for, inclusive.
        summaries: chunks that are answered by their windows: wholly inside the range, or with points that were dropped.
        blocks: chunks whose points are needed. Some may lie before `first`: they lead in to what is smoothed.
        coarsest: the widest windows (in steps) of chunks that have nothing else, because their points were dropped; 1: none.
    """

    piece: Piece
    first: int
    last: int
    summaries: Sequence[Any]
    blocks: Sequence[Any]
    coarsest: int = 1


def make_piece(row: SeriesRow, tail: Tail | None, cut: int | None) -> Piece:
    """A piece of a series with its tail; `cut`: first step that a later attempt draws."""
    width = row.series.width
    steps, values = np.empty(0, np.int64), np.empty((0, width))
    if tail is not None and len(tail.steps_N):
        with np.errstate(invalid="ignore"):
            given = np.asarray(tail.values_NW, np.float64).reshape(-1, width)
        steps, values = last_wins(np.asarray(tail.steps_N, np.int64), given)
    return Piece(row=row, steps_N=steps, values_NW=values, end=None if cut is None else cut - 1)


def points_of(fetched: Fetched, *, lead_in: bool = False) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Points in first..last of the fetched chunks and the tail, which wins; `lead_in`: those before as well.

    Raises `CorruptData`.
    """
    piece = fetched.piece
    decoded = [_decode(row, piece.row.series) for row in fetched.blocks]
    decoded.append((piece.steps_N, piece.values_NW))
    if len(decoded) == 1:
        steps, values = decoded[0]
    else:
        joined = np.concatenate([values for _, values in decoded])
        steps, values = last_wins(np.concatenate([steps for steps, _ in decoded]), joined)
    begin, end = np.searchsorted(steps, [-1 if lead_in else fetched.first, fetched.last + 1])
    return steps[begin:end], values[begin:end]


def _decode(row: Any, series: Series) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    try:
        steps = codec.decode_steps(row.step0, row.stride, row.n, row.steps, last=row.step1)
        return steps, codec.decode_values(row.data, row.n, series.width)
    except codec.CorruptData as error:
        raise _in_place(error, row, series) from error


def decode_steps(row: Any, series: Series) -> NDArray[np.int64]:
    """Steps of one chunk, without its values. Raises `CorruptData`."""
    try:
        return codec.decode_steps(row.step0, row.stride, row.n, row.steps, last=row.step1)
    except codec.CorruptData as error:
        raise _in_place(error, row, series) from error


def _in_place(error: codec.CorruptData, row: Any, series: Series) -> codec.CorruptData:
    return codec.CorruptData(
        f"{series.key}, attempt {series.attempt}, chunk at step {row.step0}: {error.reason}"
    )


def buckets_of(fetched: Fetched, width: int) -> list[Buckets]:
    """Buckets and finer windows of a piece, together holding all of first..last. Raises `CorruptData`."""
    parts = [buckets.bucketise(*points_of(fetched), width), *windows_of(fetched)]
    return [part for part in parts if len(part.first_step_B)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows of a piece by rising first step. `last_B`: the last step to draw that each may hold."""

    buckets: Buckets
    last_B: NDArray[np.int64]


def windows_of(fetched: Fetched) -> list[Buckets]:
    """Windows of the chunks that are answered by their summaries, as far as they reach into first..last.

    A window can only be drawn as a whole: that in which a later attempt takes over holds points which are not drawn.
    Raises `CorruptData`.
    """
    return [one.buckets for one in windows_with_ends(fetched)]


def windows_with_ends(fetched: Fetched) -> list[Windows]:
    """As `windows_of`, with the last step of each. Raises `CorruptData`."""
    by_type = [[row for row in fetched.summaries if row.dtype == dtype] for dtype in ("f4", "f8")]
    found = [_windows(rows, fetched) for rows in by_type if rows]
    return [one for one in found if len(one.last_B)]


def reaches_into(row: Any, fetched: Fetched) -> bool:
    """Whether a window of a chunk whose points were dropped reaches into first..last; of a damaged one it may."""
    if fetched.first > fetched.last:
        return False
    if row.step0 >= fetched.first and row.step1 <= fetched.last:
        return True
    try:
        return len(_windows([row], fetched).last_B) > 0
    except codec.CorruptData:
        return True


def _windows(rows: Sequence[Any], fetched: Fetched) -> Windows:
    series = fetched.piece.row.series
    width = max(row.summary_width for row in rows)
    try:
        decoded = buckets.decode_summaries(
            [row.summary for row in rows], width=width, columns=series.width, narrow=rows[0].dtype == "f4"
        )
    except codec.CorruptData as error:
        raise _in_place(error, rows[0], series) from error
    begin_B = decoded.first_step_B
    at_B = np.searchsorted([row.step0 for row in rows], begin_B, side="right") - 1
    masks, ends, strides = np.array(
        [(r.summary_width - 1, r.step1, max(r.stride, 1)) for r in rows], np.int64
    ).T
    last_B = np.minimum(begin_B | masks[at_B], ends[at_B])
    last_B -= (last_B - begin_B) % strides[at_B]
    kept_B = np.flatnonzero((last_B >= fetched.first) & (begin_B <= fetched.last))
    if len(kept_B) < len(begin_B):
        decoded, last_B = buckets.reordered(decoded, kept_B), last_B[kept_B]
    end = fetched.piece.end
    return Windows(buckets=decoded, last_B=last_B if end is None else np.minimum(last_B, end))


def extent(pieces: Sequence[Piece]) -> tuple[int | None, int | None]:
    """First and last step of a line made of these pieces; None if it has no points."""
    firsts = [step for piece in pieces if (step := piece.first_step) is not None]
    lasts = [step for piece in pieces if (step := piece.last_step) is not None]
    return min(firsts, default=None), max(lasts, default=None)
