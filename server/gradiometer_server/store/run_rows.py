"""Reading runs and sources: one run, a page of runs, the sources of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Connection, Row, Select, and_, bindparam, func, or_, select

from gradiometer_server.domain.names import run_key
from gradiometer_server.errors import InvalidRequest, NotFound
from gradiometer_server.store.statements import Among, of_keys
from gradiometer_server.store.tables import alert, run, series, source
from gradiometer_server.store.values import load_json, read_key, unpack_float

State = Literal["running", "finished", "failed", "crashed", "lost"]
STATES: Final[tuple[State, ...]] = ("running", "finished", "failed", "crashed", "lost")
LOST_AFTER_S: Final = 30.0
"""A run without a heartbeat for so long is lost; it recovers with the next one."""
MAX_PAGE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One writer of a run.

    Attributes:
        attempt: launch time in Unix ms.
        ordinal: number of the attempt, from 1, given when the server first hears of it and never changed, because
            series and alerts refer to it. What is *latest* follows `attempt`, should an old launch be synced late.
        last_step: highest step folded so far.
        exit: code, signal, reason, inferred, exception; None while the source is open.
    """

    run_key: int
    source_id: int
    rank: int
    attempt: int
    ordinal: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    started_s: float
    start_step: int
    environment: Mapping[str, str]
    acked_seq: int
    folded_seq: int
    last_step: int | None
    dropped_reports: int
    closed: bool
    exit: Mapping[str, Any] | None
    exit_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run as REST shows it (docs/architecture.md, **Run**), with its storage key and its settings.

    `latest` and `last_step` are of the chunks; `query.SeriesReader.latest` adds what is not yet in one. In lists, `config` and
    `unavailable` are empty.
    """

    run_key: int
    id: str
    project: str
    name: str
    state: State
    created_s: float
    updated_s: float
    heartbeat_s: float
    finished_s: float | None
    attempts: int
    world_size: int
    last_step: int | None
    tags: tuple[str, ...]
    notes: str
    group: str | None
    exit: Mapping[str, Any] | None
    latest: Mapping[str, float]
    alerts: Mapping[str, int]
    rejected_records: int
    last_rejection: str | None
    dropped_reports: int
    config: Mapping[str, Any]
    unavailable: Mapping[str, str]
    thinned_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """Runs, newest first, and where the next page starts (None: there is none)."""

    runs: tuple[RunRow, ...]
    next_cursor: str | None


_SOURCES = (
    select(source).where(source.c.run_id == bindparam("run_key")).order_by(source.c.attempt, source.c.rank)
)
_ONE_SOURCE = select(source).where(
    source.c.run_id == bindparam("run_key"), source.c.source_id == bindparam("of_source")
)
_LISTED: Final = tuple(
    column for column in run.c if column.name not in ("config", "unavailable", "search", "edited")
)
"""A list reads no config: a thousand of them would be megabytes that it does not show."""
_LISTED_RUN = select(*_LISTED).where(run.c.run_id == bindparam("run_key"))
_RUN = select(run).where(run.c.run_id == bindparam("run_key"))
_PUBLIC_IDS = of_keys(lambda among: select(run.c.run_id, run.c.public_id).where(among(run.c.run_id)))
_RUNNING = select(run.c.public_id).where(
    run.c.outcome == "open", run.c.heartbeat_s >= bindparam("heard_since_s")
)
_ALERTS = of_keys(
    lambda among: (
        select(alert.c.run_id, alert.c.state, func.count().label("num_alerts"))
        .where(among(alert.c.run_id))
        .group_by(alert.c.run_id, alert.c.state)
    )
)
_OF_SOURCES = of_keys(
    lambda among: (
        select(
            source.c.run_id,
            func.sum(source.c.dropped_reports).label("dropped"),
            func.max(source.c.last_step).label("last_step"),
        )
        .where(among(source.c.run_id))
        .group_by(source.c.run_id)
    )
)


def _latest(among: Among) -> Select[Any]:
    """Newest values; attempts in order of launch, so that the latest attempt's value is the one that stays."""
    launch = (
        select(func.min(source.c.attempt))
        .where(source.c.run_id == series.c.run_id, source.c.ordinal == series.c.attempt)
        .scalar_subquery()
    )
    return (
        select(series.c.run_id, series.c.key, series.c.last, series.c.last_step)
        .where(
            among(series.c.run_id),
            series.c.rank.is_(None),
            series.c.kind == "scalar",
            series.c.num_points > 0,
        )
        .order_by(launch)
    )


_LATEST = of_keys(_latest)
_LATEST_OF = of_keys(lambda among: _latest(among).where(series.c.key.in_(bindparam("names", expanding=True))))


def list_sources(conn: Connection, run_key: int) -> tuple[SourceRow, ...]:
    """The sources of a run, by launch and rank."""
    return tuple(source_from(row) for row in conn.execute(_SOURCES, {"run_key": run_key}))


def get_source(conn: Connection, run_key: int, source_id: int) -> SourceRow:
    """One source of a run. Raises `NotFound`."""
    row = conn.execute(_ONE_SOURCE, {"run_key": run_key, "of_source": source_id}).one_or_none()
    if row is None:
        raise NotFound("source", str(source_id))
    return source_from(row)


def source_from(row: Row[Any]) -> SourceRow:
    """A row of table `source` as a value."""
    columns = dict(row._mapping)
    columns["run_key"] = columns.pop("run_id")
    columns["environment"] = load_json(columns["environment"])
    columns["exit"] = None if columns["exit"] is None else load_json(columns["exit"])
    return SourceRow(**columns)


def get_run(conn: Connection, run_id: str, now_s: float) -> RunRow:
    """The run with this public id. Raises `NotFound`."""
    row = conn.execute(_RUN, {"run_key": run_key(run_id)}).one_or_none()
    if row is None or row.public_id != run_id:
        raise NotFound("run", run_id)
    return _rows(conn, [row], now_s)[0]


def get_listed_run(conn: Connection, run_id: str, now_s: float, metrics: Collection[str]) -> RunRow:
    """The run with this public id, as a list has it. Raises `NotFound`."""
    row = conn.execute(_LISTED_RUN, {"run_key": run_key(run_id)}).one_or_none()
    if row is None or row.public_id != run_id:
        raise NotFound("run", run_id)
    return _rows(conn, [row], now_s, metrics)[0]


def get_run_by_key(conn: Connection, key: int, now_s: float) -> RunRow:
    """The run with this storage key. Raises `NotFound`."""
    row = conn.execute(_RUN, {"run_key": key}).one_or_none()
    if row is None:
        raise NotFound("run", str(key))
    return _rows(conn, [row], now_s)[0]


def list_runs(
    conn: Connection,
    *,
    project: str | None = None,
    state: State | None = None,
    search: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
    now_s: float,
    metrics: Collection[str] | None = None,
) -> RunPage:
    """A page of runs, newest first. `search` is text inside id, name, tags, group or notes, in any case.

    Args:
        metrics: names that `latest` is limited to; None: all of a run, which may be thousands.

    Raises:
        InvalidRequest: an unknown state, a limit outside 1..1000, or a cursor that no page gave out.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit is {limit}; it must be from 1 to {MAX_PAGE}.", field="limit")
    statement = select(*_LISTED).order_by(run.c.created_s.desc(), run.c.run_id.desc()).limit(limit + 1)
    if project is not None:
        statement = statement.where(run.c.project == project)
    if state is not None:
        statement = _with_state(statement, state, now_s)
    if search:
        statement = statement.where(run.c.search.contains(search.casefold(), autoescape=True))
    if cursor is not None:
        created_s, key = _read_cursor(cursor)
        statement = statement.where(
            or_(run.c.created_s < created_s, and_(run.c.created_s == created_s, run.c.run_id < key))
        )
    found = conn.execute(statement).all()
    page = _rows(conn, found[:limit], now_s, metrics)
    more = len(found) > limit
    return RunPage(
        runs=tuple(page), next_cursor=f"{page[-1].created_s!r}_{page[-1].run_key}" if more else None
    )


def find_keys(conn: Connection, run_ids: Collection[str]) -> dict[str, int]:
    """Storage keys of those of the runs with these public ids that exist."""
    keys = {run_key(run_id): run_id for run_id in run_ids}
    rows = conn.execute(_PUBLIC_IDS.on(conn), {"keys": list(keys)})
    return {row.public_id: row.run_id for row in rows if keys[row.run_id] == row.public_id}


def list_running(conn: Connection, now_s: float) -> frozenset[str]:
    """Public ids of all runs that are running."""
    rows = conn.execute(_RUNNING, {"heard_since_s": now_s - LOST_AFTER_S})
    return frozenset(rows.scalars())


def list_projects(conn: Connection) -> tuple[str, ...]:
    """Names of all projects, in order of the alphabet."""
    return tuple(conn.execute(select(run.c.project).distinct().order_by(run.c.project)).scalars())


def _with_state(statement: Select[Any], state: State, now_s: float) -> Select[Any]:
    if state not in STATES:
        raise InvalidRequest(
            f"no run state is named {state!r}.", field="state", remedy=f"Use one of {', '.join(STATES)}."
        )
    if state in ("running", "lost"):
        silent = run.c.heartbeat_s < now_s - LOST_AFTER_S
        return statement.where(run.c.outcome == "open", silent if state == "lost" else ~silent)
    return statement.where(run.c.outcome == state)


def _read_cursor(cursor: str) -> tuple[float, int]:
    try:
        created_s, _, key = cursor.partition("_")
        return float(created_s), read_key(key)
    except ValueError as error:
        raise InvalidRequest(
            f"the cursor {cursor[:50]!r} was not given out by this server.",
            field="cursor",
            remedy="Ask for the first page without a cursor.",
        ) from error


def derive_state(outcome: str, heartbeat_s: float, now_s: float) -> State:
    """State of a run from its latest attempt's outcome and the last sign of life."""
    if outcome == "open":
        return "lost" if heartbeat_s < now_s - LOST_AFTER_S else "running"
    for state in STATES:
        if state == outcome:
            return state
    raise ValueError(f"unknown outcome {outcome!r}")


def _rows(
    conn: Connection, found: Sequence[Row[Any]], now_s: float, metrics: Collection[str] | None = None
) -> list[RunRow]:
    if not found:
        return []
    keys = {"keys": [row.run_id for row in found]}
    alerts: dict[int, dict[str, int]] = {}
    for row in conn.execute(_ALERTS.on(conn), keys):
        alerts.setdefault(row.run_id, {})[row.state] = row.num_alerts
    is_whole = "config" in found[0]._fields
    of_sources = {row.run_id: row for row in conn.execute(_OF_SOURCES.on(conn), keys)}
    latest: dict[int, dict[str, float]] = {}
    last_step = {key: row.last_step for key, row in of_sources.items() if row.last_step is not None}
    for row in _latest_rows(conn, keys, metrics):
        last_step[row.run_id] = max(row.last_step, last_step.get(row.run_id, 0))
        value = unpack_float(row.last)
        if value is not None:
            latest.setdefault(row.run_id, {})[row.key] = value
    return [
        _run_from(
            row,
            now_s=now_s,
            last_step=last_step.get(row.run_id),
            latest=latest.get(row.run_id, {}),
            alerts=alerts.get(row.run_id, {}),
            dropped_reports=int(of_sources[row.run_id].dropped) if row.run_id in of_sources else 0,
            is_whole=is_whole,
        )
        for row in found
    ]


def _latest_rows(conn: Connection, keys: Mapping[str, Any], metrics: Collection[str] | None) -> Sequence[Any]:
    if metrics is None:
        return conn.execute(_LATEST.on(conn), keys).all()
    return conn.execute(_LATEST_OF.on(conn), {**keys, "names": list(metrics)}).all() if metrics else ()


def _run_from(
    row: Row[Any],
    *,
    now_s: float,
    last_step: int | None,
    latest: dict[str, float],
    alerts: dict[str, int],
    dropped_reports: int,
    is_whole: bool,
) -> RunRow:
    return RunRow(
        run_key=row.run_id,
        id=row.public_id,
        project=row.project,
        name=row.name,
        state=derive_state(row.outcome, row.heartbeat_s, now_s),
        created_s=row.created_s,
        updated_s=row.updated_s,
        heartbeat_s=row.heartbeat_s,
        finished_s=row.finished_s,
        attempts=row.attempts,
        world_size=row.world_size,
        last_step=last_step,
        tags=tuple(load_json(row.tags)),
        notes=row.notes,
        group=row.group_name,
        exit=None if row.exit is None else load_json(row.exit),
        latest={key: value for key, value in latest.items() if not key.startswith("_")},
        alerts={"firing": alerts.get("firing", 0), "total": sum(alerts.values())},
        rejected_records=row.rejected_records,
        last_rejection=row.last_rejection,
        dropped_reports=dropped_reports,
        config=load_json(row.config) if is_whole else {},
        unavailable=load_json(row.unavailable) if is_whole else {},
        thinned_s=row.thinned_s,
    )
