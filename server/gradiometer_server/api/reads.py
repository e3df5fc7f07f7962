"""What REST and the live feed read from the store: one method per question. Every method blocks; call it in a thread."""

from __future__ import annotations

from sqlalchemy import Connection

from gradiometer_server.api.views import Json, alert_view, detail_view, run_view
from gradiometer_server.clock import Clock
from gradiometer_server.errors import StoreUnavailable
from gradiometer_server.store import alerts, migrate, run_rows, runs, series
from gradiometer_server.store.database import Database


class Reads:
    """Reads that answer in public form. Thread-safe; usable between `open` and the database's end."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._database: Database | None = None
        self._revision: str | None = None

    def open(self, database: Database) -> None:
        """Begin to answer; `database` is migrated."""
        with database.read() as conn:
            self._revision = migrate.current_revision(conn)
        self._database = database

    @property
    def database(self) -> Database:
        """The open database; raises `StoreUnavailable` before the start is done."""
        if self._database is None:
            raise StoreUnavailable(
                "the server has not opened its database yet.", remedy="Try again in a moment."
            )
        return self._database

    def check_ready(self) -> str:
        """The database's revision; raises `StoreUnavailable` when it does not answer or is not this version's."""
        with self.database.read() as conn:
            found = migrate.current_revision(conn)
        if found != self._revision:
            raise StoreUnavailable(
                f"the database is at revision {found}; this version needs {self._revision}.",
                remedy="Restart the server: it migrates at its start.",
            )
        return str(found)

    def runs(
        self,
        *,
        project: str | None,
        state: runs.State | None,
        search: str | None,
        limit: int,
        cursor: str | None,
    ) -> Json:
        """A page of runs, newest first."""
        with self.database.read() as conn:
            page = runs.list_runs(
                conn,
                project=project,
                state=state,
                search=search,
                limit=limit,
                cursor=cursor,
                now_s=self._clock.now_s(),
            )
        return {"runs": [run_view(row) for row in page.runs], "next_cursor": page.next_cursor}

    def run(self, run_id: str) -> Json:
        """One run, as it stands in a list. Raises `NotFound`."""
        with self.database.read() as conn:
            return run_view(runs.get_run(conn, run_id, self._clock.now_s()))

    def run_detail(self, run_id: str) -> Json:
        """One run with everything. Raises `NotFound`."""
        with self.database.read() as conn:
            row = runs.get_run(conn, run_id, self._clock.now_s())
            sources = runs.list_sources(conn, row.run_key)
            layouts = series.list_layouts(conn, row.run_key)
        return detail_view(run_view(row), row, sources, layouts)

    def running(self) -> frozenset[str]:
        """Public ids of the runs (the newest 500) that are running."""
        with self.database.read() as conn:
            page = runs.list_runs(conn, state="running", limit=run_rows.MAX_PAGE, now_s=self._clock.now_s())
        return frozenset(row.id for row in page.runs)

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

    def _key(self, conn: Connection, run_id: str) -> int:
        return runs.get_run(conn, run_id, self._clock.now_s()).run_key
