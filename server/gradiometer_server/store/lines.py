"""Which series make a line: all attempts of one metric of one run, cut where a later launch takes over.

Any number of lines costs the same few statements.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Connection, func, select, text

from gradiometer_server.domain.series import Tail
from gradiometer_server.store.pieces import Piece, extent, make_piece
from gradiometer_server.store.series import SeriesRow, series_row_from
from gradiometer_server.store.statements import of_keys
from gradiometer_server.store.tables import series, source
from gradiometer_server.summaries.selection import AttemptSpan, attempt_cuts

EVERY: Final = "every"
"""As a rank: a line for each rank that has a series of its own, or the merged one where none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRef:
    """What is asked for. `rank` None: merged; `attempt` (an ordinal) None: the line over all attempts."""

    run_key: int
    key: str
    rank: int | Literal["every"] | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What was found: pieces in order of launch. `began_s`: Unix seconds at which its first attempt began."""

    ref: LineRef
    rank: int | None
    pieces: tuple[Piece, ...]
    began_s: float

    @property
    def extent(self) -> tuple[int | None, int | None]:
        """First and last step, None if there are no points."""
        return extent(self.pieces)

    @property
    def num_points(self) -> int:
        """At least as many points as the line has."""
        return sum(piece.row.num_points + len(piece.steps_N) for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Attempts of several runs, and the first step that each reported where it matters for the cuts."""

    by_run: Mapping[int, Sequence[Any]]
    first_reported: Mapping[tuple[int, int], int]

    def launch(self, row: SeriesRow) -> int:
        """When a series' attempt was launched; 0 if nobody knows."""
        own = row.series
        return next((one.launch for one in self.by_run.get(own.run_key, ()) if one.ordinal == own.attempt), 0)

    def ends(self, run_key: int) -> Mapping[int, int | None]:
        """By ordinal, the first step that a later attempt draws."""
        attempts = self.by_run.get(run_key, ())
        if len(attempts) < 2:
            return {}
        return attempt_cuts(
            [
                AttemptSpan(
                    ordinal=one.ordinal, launch=one.launch, start_step=one.start,
                    first_reported=self.first_reported.get((run_key, one.ordinal)),
                )
                for one in attempts
            ]
        )  # fmt: skip

    def began_s(self, run_key: int, attempt: int | None) -> float:
        """When an attempt (None: the first launch) began, Unix seconds; 0 if nobody knows."""
        attempts = self.by_run.get(run_key, ())
        found = [one for one in attempts if attempt is None or one.ordinal == attempt]
        return min(found, key=lambda one: one.launch).began_s if found else 0.0


_ATTEMPTS = of_keys(
    lambda among: (
        select(
            source.c.run_id,
            source.c.ordinal,
            func.min(source.c.attempt).label("launch"),
            func.min(source.c.start_step).label("start"),
            func.min(source.c.started_s).label("began_s"),
        )
        .where(among(source.c.run_id))
        .group_by(source.c.run_id, source.c.ordinal)
    )
)
_FIRST_STEPS = of_keys(
    lambda among: select(series.c.run_id, series.c.series_id, series.c.attempt, series.c.first_step).where(
        among(series.c.run_id)
    )
)
_COLUMNS: Final = ", ".join(f"s.{column.name}" for column in series.c)
_OF_KEYS: Final = {
    "sqlite": "WITH want AS MATERIALIZED (SELECT json_extract(value, '$[0]') AS run_id, json_extract(value, '$[1]') AS name "
    "FROM json_each(:rows)) ",
    "postgresql": "WITH want AS MATERIALIZED (SELECT * FROM unnest(CAST(:runs AS bigint[]), CAST(:names AS text[])) "
    "AS listed(run_id, name)) ",
}
_FROM_SERIES: Final = (
    f"SELECT {_COLUMNS} FROM want CROSS JOIN series s WHERE s.run_id = want.run_id AND s.key = want.name"  # noqa: S608
)
_STATEMENTS: Final = {
    (engine, merged_only): text(
        clause + _FROM_SERIES + (" AND s.rank IS NULL" if merged_only else "") + " ORDER BY s.series_id"
    )
    for engine, clause in _OF_KEYS.items()
    for merged_only in (False, True)
}


def find_lines(
    conn: Connection, refs: Sequence[LineRef], tails: Mapping[int, Mapping[int, Tail]]
) -> list[list[Line]]:
    """Per ref, its lines: one, or several for `EVERY`, by rank; none where there is no such series.

    `tails`: by run key, of every run that is asked for.
    """
    rows = _series_rows(conn, refs)
    attempts = find_attempts(conn, {ref.run_key for ref in refs}, tails)
    found = []
    for ref in refs:
        by_rank: dict[int | None, list[SeriesRow]] = {}
        for row in rows.get((ref.run_key, ref.key), ()):
            if ref.attempt in (None, row.series.attempt):
                by_rank.setdefault(row.series.rank, []).append(row)
        found.append(
            [
                Line(
                    ref=ref,
                    rank=rank,
                    pieces=tuple(cut(by_rank[rank], tails[ref.run_key], attempts, cuts=ref.attempt is None)),
                    began_s=attempts.began_s(ref.run_key, ref.attempt),
                )
                for rank in _ranks_of(ref, by_rank)
            ]
        )
    return found


def _ranks_of(ref: LineRef, by_rank: Mapping[int | None, Any]) -> list[int | None]:
    if ref.rank == EVERY:
        ranks: list[int | None] = [*sorted(rank for rank in by_rank if rank is not None)]
        return ranks or list(by_rank)
    return [ref.rank] if ref.rank in by_rank else []


def _series_rows(conn: Connection, refs: Sequence[LineRef]) -> dict[tuple[int, str], list[SeriesRow]]:
    pairs = list(dict.fromkeys((ref.run_key, ref.key) for ref in refs if _can_be_stored(ref.key)))
    engine = "sqlite" if conn.dialect.name == "sqlite" else "postgresql"
    if engine == "sqlite":
        parameters: dict[str, Any] = {"rows": json.dumps(pairs, separators=(",", ":"))}
    else:
        parameters = {"runs": [run_key for run_key, _ in pairs], "names": [name for _, name in pairs]}
    statement = _STATEMENTS[engine, all(ref.rank is None for ref in refs)]
    found: dict[tuple[int, str], list[SeriesRow]] = {}
    for row in conn.execute(statement, parameters):
        found.setdefault((row.run_id, row.key), []).append(series_row_from(row))
    return found


def _can_be_stored(name: str) -> bool:
    """Whether a series can have this name. PostgreSQL refuses to be asked for others; SQLite's JSON ends them at NUL."""
    try:
        return "\0" not in name and bool(name.encode())
    except UnicodeEncodeError:
        return False


def find_attempts(
    conn: Connection, run_keys: Iterable[int], tails: Mapping[int, Mapping[int, Tail]]
) -> Attempts:
    """The attempts of these runs."""
    by_run: dict[int, list[Any]] = {}
    for one in conn.execute(_ATTEMPTS.on(conn), {"keys": list(run_keys)}):
        by_run.setdefault(one.run_id, []).append(one)
    # What an attempt reported first matters only where it does not say at which step it began.
    unsaid = [key for key, some in by_run.items() if len(some) > 1 and any(one.start <= 0 for one in some)]
    reported: dict[tuple[int, int], int] = {}
    first_steps: Sequence[Any] = conn.execute(_FIRST_STEPS.on(conn), {"keys": unsaid}).all() if unsaid else ()
    for row in first_steps:
        tail = tails[row.run_id].get(row.series_id)
        steps = [] if row.first_step is None else [row.first_step]
        if tail is not None and len(tail.steps_N):
            steps.append(int(tail.steps_N.min()))
        if steps:
            place = (row.run_id, row.attempt)
            reported[place] = min(*steps, reported.get(place, steps[0]))
    return Attempts(by_run=by_run, first_reported=reported)


def cut(
    rows: Sequence[SeriesRow], tails: Mapping[int, Tail], attempts: Attempts, *, cuts: bool = True
) -> list[Piece]:
    """Pieces in order of launch, each cut where a later attempt takes over (unless told not to)."""
    rows = sorted(rows, key=attempts.launch)
    if not cuts:
        return [_whole(row, tails) for row in rows]
    ends = attempts.ends(rows[0].series.run_key) if rows else {}
    return _pieces_until(rows, tails, ends)


def _pieces_until(
    rows: Sequence[SeriesRow], tails: Mapping[int, Tail], ends: Mapping[int, int | None]
) -> list[Piece]:
    """Pieces of rows in order of launch, cut at `ends` and where a later launch speaks of the same series."""
    pieces: list[Piece] = []
    taken: dict[tuple[str, int | None], int] = {}
    for row in reversed(rows):
        name = (row.series.key, row.series.rank)
        found = [end for end in (ends.get(row.series.attempt), taken.get(name)) if end is not None]
        pieces.append(make_piece(row, tails.get(row.series.series_id), min(found, default=None)))
        first = _whole(row, tails).first_step
        if first is not None:
            taken[name] = min(first, taken.get(name, first))
    return pieces[::-1]


def _whole(row: SeriesRow, tails: Mapping[int, Tail]) -> Piece:
    return make_piece(row, tails.get(row.series.series_id), None)
