"""What REST and the live feed read from the store: one method per question. Every method blocks; call it in a thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from sqlalchemy import Connection

from gradiometer_server.api.schemas import DEFAULT_METRIC
from gradiometer_server.api.views import Json, alert_view, detail_view, run_view
from gradiometer_server.clock import Clock
from gradiometer_server.domain.series import Tail
from gradiometer_server.errors import NotFound, StoreUnavailable
from gradiometer_server.store import alerts, dumps, migrate, run_rows, runs, series
from gradiometer_server.store.charts import ChartReader
from gradiometer_server.store.database import Database
from gradiometer_server.store.points import PointReader
from gradiometer_server.store.query import SeriesReader, Tails
from gradiometer_server.store.summary_values import MAX_LISTED, summary_values

LIVE_METRICS: Final = (DEFAULT_METRIC, "time/step_s")
"""What pages show of a run beside its charts. All of its metrics, told every second, would be megabytes a minute."""
LastStep = Callable[[int], int | None]
"""Run key -> highest step of its merged scalars, as far as they are in memory."""


class Latest(Protocol):
    """Run key -> (step, value) of its newest merged scalars (or those of `names`), as far as they are in memory."""

    def __call__(
        self, run_key: int, names: Collection[str] | None = None
    ) -> Mapping[str, tuple[int, float]]: ...


class Reads:
    """Reads that answer in public form. Thread-safe; usable between `open` and the database's end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._database: Database | None = None
        self._revision: str | None = None
        self._tails: Tails = _no_tails
        self._latest: Latest = _nothing
        self._last_step: LastStep = _no_step
        self._series: SeriesReader | None = None
        self._charts: ChartReader | None = None
        self._points: PointReader | None = None

    def open(self, database: Database, *, tails: Tails, latest: Latest, last_step: LastStep) -> None:
        """Begin to answer; `database` is migrated, the rest is the fold's."""
        with database.read() as conn:
            self._revision = migrate.current_revision(conn)
        self._database, self._tails = database, tails
        self._latest, self._last_step = latest, last_step
        self._series = SeriesReader(database, tails)
        self._charts, self._points = ChartReader(database, tails), PointReader(database, tails)

    @property
    def database(self) -> Database:
        """The open database; raises `StoreUnavailable` before the start is done."""
        if self._database is None:
            raise _not_open()
        return self._database

    @property
    def series(self) -> SeriesReader:
        """Reads series; raises `StoreUnavailable` before the start is done."""
        if self._series is None:
            raise _not_open()
        return self._series

    @property
    def charts(self) -> ChartReader:
        """Draws lines; raises `StoreUnavailable` before the start is done."""
        if self._charts is None:
            raise _not_open()
        return self._charts

    @property
    def points(self) -> PointReader:
        """Reads exact points; raises `StoreUnavailable` before the start is done."""
        if self._points is None:
            raise _not_open()
        return self._points

    def check_ready(self) -> str:
        """The database's revision; raises `StoreUnavailable` when it does not answer, takes no writes or is not this version's."""
        with self.database.read() as conn:
            found = migrate.current_revision(conn)
        if found != self._revision:
            raise StoreUnavailable(
                f"the database is at revision {found}; this version needs {self._revision}.",
                remedy="Restart the server: it migrates at its start.",
            )
        self.database.check_writable()
        return str(found)

    def runs(
        self,
        *,
        project: str | None,
        state: run_rows.State | None,
        search: str | None,
        limit: int,
        cursor: str | None,
        metrics: Collection[str] | None = None,
    ) -> Json:
        """A page of runs, newest first, each with the latest values and the summary of `metrics`.

        None: the latest of the loss, and the summary of what each run defined by name (`MAX_LISTED` metrics).
        """
        shown = (DEFAULT_METRIC,) if metrics is None else metrics
        with self.database.read() as conn:
            page = runs.list_runs(
                conn,
                project=project,
                state=state,
                search=search,
                limit=limit,
                cursor=cursor,
                now_s=self._clock.now_s(),
                metrics=shown,
            )
        return {
            "runs": self._views(page.runs, shown, defined=metrics is None),
            "next_cursor": page.next_cursor,
        }

    def latest(
        self, metrics: Collection[str], *, project: str | None, state: run_rows.State | None, search: str | None, limit: int,
        cursor: str | None,
    ) -> Json:  # fmt: skip
        """A page of runs, newest first, with the latest values of these metrics and little else."""
        page = self.runs(
            project=project, state=state, search=search, limit=limit, cursor=cursor, metrics=metrics
        )
        kept = ("id", "name", "project", "state", "last_step")
        rows = [{**{name: run[name] for name in kept}, "values": run["latest"]} for run in page["runs"]]
        return {"runs": rows, "next_cursor": page["next_cursor"]}

    def run(self, run_id: str) -> Json:
        """One run, as it stands in a list, with the latest of `LIVE_METRICS` alone. Raises `NotFound`."""
        with self.database.read() as conn:
            row = run_rows.get_listed_run(conn, run_id, self._clock.now_s(), LIVE_METRICS)
        return self._views([row], LIVE_METRICS)[0]

    def run_detail(self, run_id: str) -> Json:
        """One run with everything. Raises `NotFound`."""
        with self.database.read() as conn:
            row = runs.get_run(conn, run_id, self._clock.now_s())
            sources = runs.list_sources(conn, row.run_key)
            layouts = series.list_layouts(conn, row.run_key)
            saved = dumps.list_dumps(conn, row.run_key)
        return detail_view(self._views([row])[0], row, sources, layouts, saved)

    def running(self) -> frozenset[str]:
        """Public ids of the runs that are running."""
        with self.database.read() as conn:
            return run_rows.list_running(conn, self._clock.now_s())

    def alerts(self, *, run_id: str | None, state: str | None, limit: int, cursor: str | None) -> Json:
        """A page of alerts, newest first. Raises `NotFound` for an unknown run."""
        with self.database.read() as conn:
            key = None if run_id is None else self._key(conn, run_id)
            page = alerts.list_episodes(conn, key, state, limit, cursor)
        rows = [alert_view(row.run_id, row.episode) for row in page.episodes]
        return {"alerts": rows, "next_cursor": page.next_cursor}

    def alert(self, run_id: str, alert_id: str) -> Json:
        """One alert. Raises `NotFound`."""
        with self.database.read() as conn:
            episode = alerts.get_episode(conn, self._key(conn, run_id), alert_id)
        return alert_view(run_id, episode)

    def key(self, run_id: str) -> int:
        """Storage key of a run. Raises `NotFound`."""
        with self.database.read() as conn:
            return self._key(conn, run_id)

    def keys(self, run_ids: Collection[str]) -> Mapping[str, int]:
        """Storage keys of those of the runs that exist."""
        with self.database.read() as conn:
            return run_rows.find_keys(conn, run_ids)

    def _key(self, conn: Connection, run_id: str) -> int:
        found = run_rows.find_keys(conn, [run_id])
        if run_id not in found:
            raise NotFound("run", run_id)
        return found[run_id]

    def _views(
        self,
        rows: Sequence[run_rows.RunRow],
        metrics: Collection[str] | None = None,
        *,
        defined: bool = False,
    ) -> list[Json]:
        keys = [row.run_key for row in rows]
        names, most = (None, MAX_LISTED) if defined else (metrics, None)
        summaries = summary_values(self.database, keys, self._tails, names, most=most)
        return [self._view(row, metrics, summaries.get(row.run_key)) for row in rows]

    def _view(
        self, row: run_rows.RunRow, metrics: Collection[str] | None, summary: Mapping[str, float] | None
    ) -> Json:
        newest = self._latest(row.run_key, metrics)
        latest = {name: value for name, (_, value) in newest.items() if not name.startswith("_")}
        return run_view(row, latest=latest, last_step=self._last_step(row.run_key), summary=summary)


def _no_tails(_run_key: int) -> Mapping[int, Tail]:
    return {}


def _nothing(run_key: int, names: Collection[str] | None = None) -> Mapping[str, tuple[int, float]]:
    return {}


def _no_step(_run_key: int) -> int | None:
    return None


def _not_open() -> StoreUnavailable:
    return StoreUnavailable("the server has not opened its database yet.", remedy="Try again in a moment.")
