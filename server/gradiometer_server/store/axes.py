"""Which steps a range of x can touch, from what chunks say of their extremes: only those are decoded.

A step without an x of its own has the x that was known before it (`summaries.axis.carried`), so a range reaches on to the
next step at which x is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection

from gradiometer_server.store.fetching import Wish, overview
from gradiometer_server.store.lines import Line
from gradiometer_server.store.pieces import Piece

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
    is_tail: bool = False

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
    spans = [_Span(first=row.step0, last=row.step1, low=row.min, high=row.max) for row in rows]
    if len(piece.steps_N):
        finite = piece.values_NW[np.isfinite(piece.values_NW)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (None, None)
        spans.append(
            _Span(first=int(piece.steps_N[0]), last=int(piece.steps_N[-1]), low=low, high=high, is_tail=True)
        )
    return spans


def _range_of(spans: Sequence[_Span], low: float | None, high: float | None) -> AxisRange | None:
    hits = [span for span in spans if span.touches(low, high)]
    if not hits:
        return None
    first, last = min(span.first for span in hits), max(span.last for span in hits)
    before = [span for span in spans if span.first < first and span.low is not None]
    chunks = [span.first for span in before if not span.is_tail]
    tails = [span.first for span in before if span.is_tail]
    after = [span for span in spans if span.first > last and span.low is not None]
    return AxisRange(
        # Steps before x was first known have the first x that became known.
        first=first if before else 0,
        last=min((span.first for span in after), default=_MAX_STEP + 1) - 1,
        # A tail may lie over many chunks; of these, the last one is enough.
        known_from=min([*tails, *chunks[-1:]], default=0),
    )
