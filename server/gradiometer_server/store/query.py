"""Reads series for charts: chunks and summaries, over all attempts, with what the fold has not yet flushed.

Tails are taken before the snapshot: a flush in between then shows the same points twice, which is harmless, and never
not at all. Rows are decoded after the snapshot is closed, so that no reader holds SQLite's WAL.

Shape letters: N points, B buckets, W width of a series, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, func, select

from gradiometer_server.domain.folded import Layout
from gradiometer_server.domain.names import LAYER_PREFIX
from gradiometer_server.domain.series import Buckets, Tail
from gradiometer_server.errors import InvalidRequest
from gradiometer_server.store.charts import Tails, no_such_metric
from gradiometer_server.store.database import Database
from gradiometer_server.store.fetching import Wish, fetch_all, fetch_last, widest
from gradiometer_server.store.layers_at import LayersAt, common_of, layers_at, layout_id_of
from gradiometer_server.store.lines import Line, LineRef, cut, find_attempts, find_lines
from gradiometer_server.store.metric_rows import Latest, MetricRow, last_value, metric_of
from gradiometer_server.store.pieces import (
    Fetched,
    Piece,
    buckets_of,
    decode_steps,
    extent,
    make_piece,
    points_of,
)
from gradiometer_server.store.points import refuse_thinned
from gradiometer_server.store.series import list_layouts, list_series, series_row_from
from gradiometer_server.store.tables import series, source
from gradiometer_server.summaries import buckets as bucketing
from gradiometer_server.summaries.columns import places, spread
from gradiometer_server.summaries.selection import display_width

__all__ = ["MAX_BUCKETS", "Latest", "MetricRow", "SeriesReader", "Tails"]

MAX_BUCKETS: Final = 100_000
_MAX_STEP: Final = 2**53 - 1

_SCALARS = select(series).where(
    series.c.run_id.in_(bindparam("runs", expanding=True)), series.c.rank.is_(None), series.c.kind == "scalar"
)
_SCALARS_OF = _SCALARS.where(series.c.key.in_(bindparam("names", expanding=True)))
_LAUNCHES = (
    select(source.c.run_id, source.c.ordinal, func.min(source.c.attempt).label("launch"))
    .where(source.c.run_id.in_(bindparam("runs", expanding=True)))
    .group_by(source.c.run_id, source.c.ordinal)
)


class SeriesReader:
    """Answers questions about series. Thread-safe; holds nothing between calls."""

    def __init__(self, database: Database, tails: Tails) -> None:
        self._database, self._tails = database, tails

    def query(
        self,
        run_key: int,
        key: str,
        rank: int | None = None,
        first: int | None = None,
        last: int | None = None,
        buckets: int = 2000,
        *,
        attempt: int | None = None,
    ) -> tuple[Buckets, int | None, int | None]:
        """Buckets of a metric over first..last (inclusive; None: all), at most `buckets` of them.

        Returns the buckets (B, W) and the first and last step of the whole line, None if it has no points. Every
        spike and every NaN is in its own bucket, whatever the zoom. With `attempt` (an ordinal): all of that attempt,
        also where a later one took over.

        Raises:
            NotFound: the run has no such metric, or not for this rank or attempt.
            InvalidRequest: a range that ends before it begins, or a number of buckets outside 1..100,000.
            CorruptData, StoreUnavailable.
        """
        _check(first, last, buckets)
        tails = self._tails(run_key)
        with self._database.read() as conn:
            pieces = _line(conn, run_key, key, rank, tails, attempt).pieces
            begin, end = extent(pieces)
            width, fetched = _fetch(conn, pieces, first, last, buckets)
        columns = pieces[0].row.series.width
        parts = [part for one in fetched for part in buckets_of(one, width)]
        return (bucketing.merge(parts, width) if parts else bucketing.empty(width, columns)), begin, end

    def raw(
        self,
        run_key: int,
        key: str,
        rank: int | None = None,
        first: int | None = None,
        last: int | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Exact steps (N,) and values (N, W) of a metric over first..last, bit for bit. Raises as `query`."""
        _check(first, last, 1)
        tails = self._tails(run_key)
        with self._database.read() as conn:
            pieces = _line(conn, run_key, key, rank, tails).pieces
            low, high = _clip(first, 0), _clip(last, _MAX_STEP)
            wishes = [Wish(piece=piece, first=low, last=high, width=0) for piece in pieces]
            fetched = fetch_all(conn, wishes)
        refuse_thinned(fetched)
        decoded = [points_of(one) for one in fetched]
        # Attempts do not overlap once cut; sorted, because a late launch may lie before an earlier one.
        steps = np.concatenate([steps for steps, _ in decoded])
        order = np.argsort(steps, kind="stable")
        return steps[order], np.concatenate([values for _, values in decoded])[order]

    def layers(
        self,
        run_key: int,
        statistic: str,
        first: int | None = None,
        last: int | None = None,
        columns: int = 1000,
    ) -> tuple[Layout, Buckets]:
        """A layer statistic as at most `columns` buckets of all layers (B, L), in the newest attempt's layout.

        Layers of earlier attempts are matched by name. Raises as `query`.
        """
        return self.layers_of(run_key, statistic, first, last, columns)[:2]

    def layers_of(
        self, run_key: int, statistic: str, first: int | None, last: int | None, columns: int
    ) -> tuple[Layout, Buckets, int | None, int | None]:
        """As `layers`, with the first and last step of the whole statistic."""
        _check(first, last, columns)
        tails = self._tails(run_key)
        with self._database.read() as conn:
            pieces = _line(conn, run_key, LAYER_PREFIX + statistic, None, tails).pieces
            layouts = {layout.layout_id: layout for layout in list_layouts(conn, run_key)}
            width, fetched = _fetch(conn, pieces, first, last, columns)
        common = common_of(pieces, layouts)
        parts: list[Buckets] = []
        for one in fetched:
            to = places(layouts[layout_id_of(one.piece)], common)
            parts.extend(spread(part, to, len(common.names)) for part in buckets_of(one, width))
        found = bucketing.merge(parts, width) if parts else bucketing.empty(width, len(common.names))
        return common, found, *extent(pieces)

    def layer_statistics_at(self, run_key: int, step: int | None = None) -> LayersAt:
        """All layer statistics at the last step <= `step` (None: the newest).

        Those that are not measured in every step are of the last step in which they were: see `LayersAt`.

        Raises:
            NotFound: no layer statistics at or before that step.
        """
        tails = self._tails(run_key)
        limit = _clip(step, _MAX_STEP)
        with self._database.read() as conn:
            rows = [
                row
                for row in list_series(conn, run_key)
                if row.series.kind == "layer" and row.series.rank is None
            ]
            of_runs = {run_key: tails}
            pieces = cut(rows, tails, find_attempts(conn, [run_key], of_runs))
            layouts = {layout.layout_id: layout for layout in list_layouts(conn, run_key)}
            fetched = [fetch_last(conn, piece, limit) for piece in pieces]
        return layers_at(fetched, layouts, limit)

    def latest(self, run_keys: Iterable[int]) -> dict[int, Latest]:
        """Newest merged scalars of several runs in one go, tails included; hidden metrics (`_...`) left out."""
        keys = list(run_keys)
        tails = {key: self._tails(key) for key in keys}
        with self._database.read() as conn:
            launches = {(r.run_id, r.ordinal): r.launch for r in conn.execute(_LAUNCHES, {"runs": keys})}
            rows = [series_row_from(row) for row in conn.execute(_SCALARS, {"runs": keys})]
        rows.sort(key=lambda row: launches.get((row.series.run_key, row.series.attempt), 0))
        last_steps: dict[int, int] = {}
        values: dict[int, dict[str, float]] = {key: {} for key in keys}
        for row in rows:
            run_key = row.series.run_key
            piece = make_piece(row, tails[run_key].get(row.series.series_id), None)
            if piece.last_step is None:
                continue
            last_steps[run_key] = max(piece.last_step, last_steps.get(run_key, 0))
            value = last_value(piece)
            if value is not None and not row.series.key.startswith("_"):
                values[run_key][row.series.key] = value
        return {key: Latest(last_step=last_steps.get(key), values=values[key]) for key in keys}

    def metrics(self, run_key: int) -> list[MetricRow]:
        """All metrics of a run by name, hidden ones left out."""
        tails = self._tails(run_key)
        with self._database.read() as conn:
            rows = list_series(conn, run_key)
            attempts = find_attempts(conn, [run_key], {run_key: tails})
            pieces = cut(rows, tails, attempts, cuts=False)
        by_name: dict[str, list[Piece]] = {}
        for piece in pieces:
            if not piece.row.series.key.startswith("_"):
                by_name.setdefault(piece.row.series.key, []).append(piece)
        return [metric_of(name, by_name[name]) for name in sorted(by_name)]


def _check(first: int | None, last: int | None, buckets: int) -> None:
    if first is not None and last is not None and first > last:
        raise InvalidRequest(f"the range begins at step {first} but ends at {last}.", field="from")
    if not 1 <= buckets <= MAX_BUCKETS:
        raise InvalidRequest(
            f"{buckets} buckets were asked for; it must be 1 to {MAX_BUCKETS}.", field="buckets"
        )


def _clip(step: int | None, otherwise: int) -> int:
    """A step that every engine can compare with: callers may name any number."""
    return otherwise if step is None else min(max(step, -1), _MAX_STEP)


def _line(
    conn: Connection,
    run_key: int,
    key: str,
    rank: int | None,
    tails: Mapping[int, Tail],
    attempt: int | None = None,
) -> Line:
    ref = LineRef(run_key=run_key, key=key, rank=rank, attempt=attempt)
    (lines,) = find_lines(conn, [ref], {run_key: tails})
    if not lines:
        raise no_such_metric(ref)
    return lines[0]


def _fetch(
    conn: Connection, pieces: Sequence[Piece], first: int | None, last: int | None, most: int
) -> tuple[int, list[Fetched]]:
    begin, end = extent(pieces)
    if begin is None or end is None:
        return 1, []
    low = begin if first is None else max(begin, first)
    high = end if last is None else min(end, last)
    if low > high:
        return 1, []
    width = display_width(low, high, most)
    fit = most if width > 1 else 0
    fetched = fetch_all(
        conn, [Wish(piece=piece, first=low, last=high, width=width, fit=fit) for piece in pieces]
    )
    if not any(one.summaries for one in fetched) and _num_points(fetched) <= most:
        return 1, fetched
    return max(width, widest(fetched)), fetched


def _num_points(fetched: Iterable[Fetched]) -> int:
    """Points inside the range, those of the tails that replace others counted twice."""
    total = 0
    for one in fetched:
        steps = [decode_steps(row, one.piece.row.series) for row in one.blocks]
        steps.append(one.piece.steps_N)
        total += sum(int(((some >= one.first) & (some <= one.last)).sum()) for some in steps)
    return total
