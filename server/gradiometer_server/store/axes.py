"""Which steps a range of x can touch, from what chunks say of their extremes: only those are decoded, to what is known of x.

A step without an x of its own has the x that was known before it (`summaries.axis.carried`), so a range reaches on to the
next step at which x is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection

from gradiometer_server.store.fetching import Wish, overview
from gradiometer_server.store.lines import Line
from gradiometer_server.store.pieces import Fetched, Piece, Windows, points_of, windows_with_ends
from gradiometer_server.summaries.known_x import NEVER, KnownX

_MAX_STEP: Final = 2**53 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRange:
    """Steps first..last (inclusive) that may lie in the range of x; x must be known from step `known_from` on."""

    first: int
    last: int
    known_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Neighbouring points of an x metric: their steps, and their extremes (None: none is finite)."""

    first: int
    last: int
    low: float | None
    high: float | None

    def touches(self, low: float | None, high: float | None) -> bool:
        if self.low is None or self.high is None:
            return False
        return (low is None or self.high >= low) and (high is None or self.low <= high)


def axis_ranges(
    conn: Connection, wanted: Sequence[tuple[Line | None, float | None, float | None]]
) -> list[AxisRange | None]:
    """For each line of x and range of its values (inclusive; None: open): the steps; None if there are none."""
    wishes = [
        [Wish(piece=piece, first=0, last=_MAX_STEP, width=0) for piece in axis.pieces]
        if axis is not None and (low is not None or high is not None)
        else []
        for axis, low, high in wanted
    ]
    rows = iter(overview(conn, [wish for some in wishes for wish in some]))
    found: list[AxisRange | None] = []
    for (axis, low, high), some in zip(wanted, wishes, strict=True):
        if axis is None:
            found.append(None)
        elif low is None and high is None:
            found.append(AxisRange(first=0, last=_MAX_STEP, known_from=0))
        else:
            spans = [span for wish in some for span in _spans(wish.piece, next(rows))]
            found.append(_range_of(sorted(spans, key=lambda span: span.first), low, high))
    return found


def _spans(piece: Piece, rows: Iterable[Any]) -> list[_Span]:
    end = _MAX_STEP if piece.end is None else piece.end
    # Of a chunk that is cut it is not known which of its points have the extremes: it may hold any step from there on.
    spans = [
        _Span(first=row.step0, last=row.step1 if row.step1 <= end else _MAX_STEP, low=row.min, high=row.max)
        for row in rows
    ]
    if len(piece.steps_N):
        finite = piece.values_NW[np.isfinite(piece.values_NW)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (None, None)
        spans.append(_Span(first=int(piece.steps_N[0]), last=int(piece.steps_N[-1]), low=low, high=high))
    return spans


def _range_of(spans: Sequence[_Span], low: float | None, high: float | None) -> AxisRange | None:
    hits = [span for span in spans if span.touches(low, high)]
    if not hits:
        return None
    if any(one.last >= following.first for one, following in itertools.pairwise(spans)):
        # Points that came late, or an attempt that took over, may replace what a span promises.
        return AxisRange(first=0, last=_MAX_STEP, known_from=0)
    known = [span for span in spans if span.low is not None]
    before = [span for span in known if span.first < hits[0].first]
    after = [span for span in known if span.first > hits[-1].last]
    return AxisRange(
        # Steps before x was first known have the first x that became known.
        first=hits[0].first if before else 0,
        last=after[0].first - 1 if after else _MAX_STEP,
        known_from=before[-1].first if before else 0,
    )


def known_x(beside: Sequence[Fetched]) -> KnownX:
    """What is known of x: its points, and the windows of those that were dropped. Raises `CorruptData`."""
    parts = [KnownX.of_points(np.empty(0, np.int64), np.empty(0))] if not beside else []
    for one in beside:
        steps_M, values_M1 = points_of(one)
        parts.append(KnownX.of_points(steps_M, values_M1[:, 0]))
        parts += [_known_windows(some, one.piece.end) for some in windows_with_ends(one)]
    return KnownX.join(parts)


def _known_windows(windows: Windows, end: int | None) -> KnownX:
    rows, last_M = windows.buckets, windows.last_B
    is_whole_M = (rows.num_nan_BW + rows.num_pos_inf_BW + rows.num_neg_inf_BW)[:, 0] == 0
    # The finite ones of a window that is cut may all lie behind the cut.
    some_M = np.where(last_M == end, NEVER, last_M) if end is not None else last_M
    return KnownX(
        first_M=rows.first_step_B,
        last_M=last_M,
        sure_M=np.where(is_whole_M, rows.first_step_B, some_M),
        low_M=rows.min_BW[:, 0],
        high_M=rows.max_BW[:, 0],
    )
