"""Reads chunks of many series with two statements: first what there is and the summaries, then the points that are needed.

The list of what is wanted travels as one parameter (JSON on SQLite, arrays on PostgreSQL), so that a request for a
thousand series costs as many round trips as one for a single series, and no statement is compiled anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, TextClause, bindparam, select, text

from gradiometer_server.store.pieces import Fetched, Piece, reaches_into
from gradiometer_server.store.tables import chunk
from gradiometer_server.summaries.selection import needs_points


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is wanted of one piece.

    Attributes:
        first, last: range of steps, inclusive.
        width: of the buckets; a summary with windows of at most this many steps will do. 0: points only.
        lead: finite points wanted before `first` as well.
        fit: if at most so many points may be inside the range, all of it is wanted as points.
    """

    piece: Piece
    first: int
    last: int
    width: int
    lead: int = 0
    fit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Which chunks of a wish are answered by summaries, which by points (their first steps), which have only windows."""

    summaries: Sequence[Any]
    begins: Sequence[int]
    coarsest: int


class _Wanted:
    """A table of integers as a parameter: columns `place`, `run_id`, `series_id`, and those named."""

    def __init__(self, *names: str) -> None:
        self._names = ("run_id", "series_id", *names)

    def clause(self, conn: Connection) -> str:
        """WITH clause that names the table `want`."""
        if conn.dialect.name == "sqlite":
            columns = ", ".join(
                f"json_extract(value, '$[{at}]') AS {name}" for at, name in enumerate(self._names)
            )
            return f"WITH want AS MATERIALIZED (SELECT key AS place, {columns} FROM json_each(:rows)) "  # noqa: S608 - names are ours
        arrays = ", ".join(f"CAST(:c{at} AS bigint[])" for at in range(len(self._names)))
        columns = ", ".join(self._names)
        return (
            f"WITH want AS MATERIALIZED (SELECT place - 1 AS place, {columns} "  # noqa: S608 - names are ours
            f"FROM unnest({arrays}) WITH ORDINALITY AS listed({columns}, place)) "
        )

    def parameters(self, conn: Connection, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The rows, without `place`: it is their position."""
        if conn.dialect.name == "sqlite":
            return {"rows": json.dumps(rows, separators=(",", ":"))}
        return {f"c{at}": [row[at] for row in rows] for at in range(len(self._names))}


class Statement:
    """SQL over a `want` table, compiled once per engine."""

    def __init__(self, wanted: _Wanted, body: str) -> None:
        self._wanted, self._body = wanted, body
        self._by_engine: dict[str, TextClause] = {}

    def run(self, conn: Connection, rows: Sequence[Sequence[int]]) -> Sequence[Any]:
        """All rows of the answer; none if nothing is wanted."""
        if not rows:
            return ()
        engine = conn.dialect.name
        statement = self._by_engine.get(engine)
        if statement is None:
            length = "length" if engine == "sqlite" else "octet_length"
            body = self._body.replace("LENGTH(", f"{length}(")
            statement = self._by_engine[engine] = text(self._wanted.clause(conn) + body)
        return conn.execute(statement, self._wanted.parameters(conn, rows)).all()


# A range begins inside the last chunk that starts before it. CROSS JOIN keeps SQLite from turning the order around.
_OVERVIEW = Statement(
    _Wanted("first", "last", "width"),
    """
SELECT want.place, c.step0, c.step1, c.n, c.stride, c.dtype, c.summary_width, c.num_nonfinite, c.min, c.max,
  LENGTH(c.data) AS num_bytes,
  CASE WHEN c.summary_width <= want.width OR LENGTH(c.data) = 0 THEN c.summary END AS summary
FROM want CROSS JOIN chunk c
WHERE c.run_id = want.run_id AND c.series_id = want.series_id
  AND c.step0 >= coalesce((SELECT max(b.step0) FROM chunk b WHERE b.run_id = want.run_id
    AND b.series_id = want.series_id AND b.step0 <= want.first), want.first)
  AND c.step0 <= want.last AND c.step1 >= want.first
ORDER BY want.place, c.step0
""",
)
_POINTS = Statement(
    _Wanted("step0", "of_wish"),
    """
SELECT want.of_wish, c.step0, c.step1, c.n, c.stride, c.steps, c.data
FROM want CROSS JOIN chunk c
WHERE c.run_id = want.run_id AND c.series_id = want.series_id AND c.step0 = want.step0
ORDER BY want.place
""",
)
_STEPS = Statement(
    _Wanted("step0", "of_wish"),
    """
SELECT want.of_wish, c.step0, c.step1, c.n, c.stride, c.steps, LENGTH(c.data) AS num_bytes
FROM want CROSS JOIN chunk c
WHERE c.run_id = want.run_id AND c.series_id = want.series_id AND c.step0 = want.step0
ORDER BY want.place
""",
)
_LAST = (
    select(chunk.c.step0, chunk.c.step1, chunk.c.n, chunk.c.stride, chunk.c.steps, chunk.c.data)
    .where(
        chunk.c.run_id == bindparam("of_run"),
        chunk.c.series_id == bindparam("of_series"),
        chunk.c.step0 <= bindparam("last"),
    )
    .order_by(chunk.c.step0.desc())
    .limit(1)
)
_MIN: Final = -1


def overview(conn: Connection, wishes: Sequence[Wish]) -> list[list[Any]]:
    """Per wish, its chunks by rising step, without points."""
    rows = [(*_ids(wish.piece), _MIN if wish.lead else wish.first, _end(wish), wish.width) for wish in wishes]
    found: list[list[Any]] = [[] for _ in wishes]
    for row in _OVERVIEW.run(conn, rows):
        found[row.place].append(row)
    return found


def fetch_all(conn: Connection, wishes: Sequence[Wish]) -> list[Fetched]:
    """Everything that the wishes need, one after the other, in this snapshot."""
    choices = [_choose(wish, rows) for wish, rows in zip(wishes, overview(conn, wishes), strict=True)]
    blocks = _blocks(conn, _POINTS, wishes, [choice.begins for choice in choices])
    return [
        Fetched(
            piece=wish.piece, first=wish.first, last=_end(wish), summaries=choice.summaries, blocks=some,
            coarsest=choice.coarsest,
        )
        for wish, choice, some in zip(wishes, choices, blocks, strict=True)
    ]  # fmt: skip


def fetch_steps(conn: Connection, wishes: Sequence[Wish]) -> list[list[Any]]:
    """Per wish, the chunks that touch its range, with their steps but without values."""
    begins = [[row.step0 for row in rows] for rows in overview(conn, wishes)]
    return _blocks(conn, _STEPS, wishes, begins)


def fetch_last(conn: Connection, piece: Piece, last: int) -> Fetched:
    """Read the chunk that holds the last step <= `last`; nothing if its points were dropped."""
    if piece.end is not None:
        last = min(last, piece.end)
    run_key, series_id = _ids(piece)
    blocks = conn.execute(_LAST, {"of_run": run_key, "of_series": series_id, "last": last}).all()
    kept = [row for row in blocks if row.data]
    return Fetched(piece=piece, first=0, last=last, summaries=(), blocks=kept)


def _blocks(
    conn: Connection, statement: Statement, wishes: Sequence[Wish], begins: Iterable[Sequence[int]]
) -> list[list[Any]]:
    rows = [
        (*_ids(wish.piece), begin, place)
        for place, (wish, some) in enumerate(zip(wishes, begins, strict=True))
        for begin in some
    ]
    found: list[list[Any]] = [[] for _ in wishes]
    for row in statement.run(conn, rows):
        found[row.of_wish].append(row)
    return found


def _choose(wish: Wish, rows: Sequence[Any]) -> _Choice:
    end, tail_N = _end(wish), wish.piece.steps_N
    before = [row for row in rows if row.step1 < wish.first] if wish.lead else []
    inside = rows[len(before) :]
    all_points = wish.width == 0 or _may_fit(wish, inside, end)
    summaries, begins, coarsest = [], _leading(before, wish.lead), 1
    nothing = Fetched(piece=wish.piece, first=wish.first, last=end, summaries=(), blocks=())
    for row in inside:
        if row.num_bytes == 0:
            # At the ends of the range a chunk may reach into it with none of its windows.
            if reaches_into(row, nothing):
                summaries.append(row)
                coarsest = max(coarsest, row.summary_width)
        elif all_points or needs_points(
            row, first=wish.first, last=end, width=wish.width, tail_steps_N=tail_N
        ):
            begins.append(row.step0)
        else:
            summaries.append(row)
    return _Choice(summaries=summaries, begins=begins, coarsest=coarsest)


def _may_fit(wish: Wish, rows: Sequence[Any], end: int) -> bool:
    """Whether there may be few enough points, as far as chunks that the range does not cut tell."""
    total = 0
    for row in rows:
        if row.step0 >= wish.first and row.step1 <= end:
            total += row.n
            if total > wish.fit:
                return False
    return True


def _leading(before: Sequence[Any], lead: int) -> list[int]:
    """First steps of the last chunks in `before` that together have `lead` finite values."""
    begins: list[int] = []
    for row in reversed(before):
        if lead <= 0:
            break
        if row.num_bytes:
            begins.append(row.step0)
            lead -= row.n - row.num_nonfinite
    return begins[::-1]


def _end(wish: Wish) -> int:
    return wish.last if wish.piece.end is None else min(wish.last, wish.piece.end)


def _ids(piece: Piece) -> tuple[int, int]:
    series = piece.row.series
    return series.run_key, series.series_id


def widest(fetched: Iterable[Fetched]) -> int:
    """The widest windows that stand for points which are no longer there; 1: there are none."""
    return int(np.max([one.coarsest for one in fetched], initial=1))
