"""Retention by a real server, on both engines: what old runs lose, what none may lose, and what it says about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sqlalchemy import func, select, update

from gradiometer import wire
from gradiometer_server.api.housekeeping import HousekeepingView
from gradiometer_server.clock import SystemClock
from gradiometer_server.errors import ConfigurationError
from gradiometer_server.housekeeping.policy import due_by_age, due_by_size
from gradiometer_server.settings import Retention, retention_from
from gradiometer_server.store import details, space
from gradiometer_server.store.checking import check
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.edits import RunEdit, edit_run
from gradiometer_server.store.space import RunSpace
from gradiometer_server.store.tables import chunk, deleted_run, detail, run, source_schema
from tests.integration.stores import LOSS, flush, new_run, new_series, tail
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, frame, layer_schema, scalar_schema

DAY_S = 86_400.0
POINTS = 80_000
CHUNKS = 20


def old_run(
    database: Database, run_id: str, days: float, *, outcome: str = "finished", keep: bool = False
) -> int:
    """A run with a spike, a NaN and a ring, that said its last word so long ago."""
    key = new_run(database, run_id)
    (one,) = new_series(database, key, 1, LOSS)
    values = np.random.default_rng(3).standard_normal(POINTS)
    values[[123, 4567]] = [1e9, np.nan]
    flush(database, key, (one, tail(np.arange(1, POINTS + 1), values)))
    then_s = time.time() - days * DAY_S
    with database.write() as conn:
        schema = layer_schema(("a", 4))
        conn.execute(source_schema.insert(), {"run_id": key, "source_id": 1, "seq": 1, "data": schema})
        ring = wire.decode_record(frame({step: [float(step)] * 7 for step in range(1, 60)}, schema_id=2))
        assert isinstance(ring, wire.Frame)
        sent = wire.Detail(
            kind="ring", reason="r", schema_id=2, steps=ring.steps, times=ring.times, values=ring.values
        )
        details.add_details(conn, key, [(1, 2, sent)])
        if keep:
            edit_run(conn, run_id, RunEdit(tags=["a", "keep"]), then_s)
        changed = {"outcome": outcome, "heartbeat_s": then_s, "updated_s": then_s}
        conn.execute(update(run).where(run.c.run_id == key).values(**changed))
    return key


def left(database: Database) -> dict[str, tuple[int, int]]:
    """By run: chunks that have their points, and details."""
    with database.read() as conn:
        return {
            row.public_id: (
                conn.execute(
                    select(func.count()).where(chunk.c.run_id == row.run_id, func.length(chunk.c.data) > 0)
                ).scalar_one(),
                conn.execute(select(func.count()).where(detail.c.run_id == row.run_id)).scalar_one(),
            )
            for row in conn.execute(select(run.c.run_id, run.c.public_id))
        }


def figures(made: Server) -> dict[str, Any]:
    found: dict[str, Any] = made.get("/housekeeping")
    HousekeepingView.model_validate(found)
    return found


def passed(made: Server) -> bool:
    return figures(made)["last_pass_s"] is not None


def test_old_runs_lose_what_they_may_and_others_nothing(
    server: Callable[..., Server], database_url: str
) -> None:
    database = open_database(database_url, clock=SystemClock())
    whole = (CHUNKS, 1)
    for name, days, more in (
        ("fresh", 0.5, {}), ("week", 8, {}), ("month", 40, {}), ("year", 400, {}), ("kept", 400, {"keep": True}),
        ("lost", 40, {"outcome": "open"}), ("silent", 0.9, {"outcome": "open"}),
    ):  # fmt: skip
        old_run(database, name, days, **more)  # type: ignore[arg-type]
    assert set(left(database).values()) == {whole}
    before = space.used_bytes(database)
    database.close()
    made = server(
        database_url,
        environment={
            "GRADIOMETER_RETENTION_DETAIL_DAYS": "7", "GRADIOMETER_RETENTION_THIN_DAYS": "30",
            "GRADIOMETER_RETENTION_DELETE_DAYS": "365",
        },
    )  # fmt: skip
    eventually(lambda: passed(made), 60)
    eventually(lambda: figures(made)["runs_purged"] == 1, 60)
    database = Database(database_url)
    assert left(database) == {
        "fresh": whole, "week": (CHUNKS, 0), "month": (0, 0), "kept": whole, "lost": whole, "silent": whole,
    }  # fmt: skip
    found = figures(made)
    assert (found["details_dropped"], found["runs_thinned"], found["runs_deleted"]) == (2, 1, 1)
    assert found["failures"] == 0, found["last_failure"]
    assert found["freed_bytes"] > 6 * POINTS
    if database.path is not None:
        assert space.used_bytes(database) < before
        eventually(lambda: figures(made)["released_bytes"] > 0, 30)
    assert [
        line
        for line in made.log.splitlines()
        if "run month lost its raw points" in line and "40.0 days" in line
    ]
    query = {"series": [{"run": "month", "metric": "train/loss"}], "buckets": 50}
    points = made.post("/series/query", query)["series"][0]["points"]
    assert max(points["max"]) == 1e9
    assert (sum(points["nan"]), sum(points["count"])) == (1, POINTS - 1)
    assert [str(problem) for problem in check(database)] == []
    database.close()


def test_beyond_its_size_the_oldest_go_first_and_live_runs_never(
    server: Callable[..., Server], database_url: str
) -> None:
    database = open_database(database_url, clock=SystemClock())
    for name, days in (("oldest", 30), ("older", 20), ("old", 10)):
        old_run(database, name, days)
    sizes = {one.run_id: one for one in space.list_space(database, with_bytes=True)}
    raw_bytes = sizes["oldest"].raw_bytes
    assert raw_bytes > 50_000
    used_bytes = space.used_bytes(database)
    if database.path is None:
        used_bytes = sum(one.num_bytes for one in sizes.values())
    detail_bytes = sum(one.detail_bytes for one in sizes.values())
    database.close()
    # So much that all details and the points of the oldest run have to go, and no more.
    limit = used_bytes - detail_bytes - raw_bytes // 2
    made = server(database_url, environment={"GRADIOMETER_RETENTION_MAX_BYTES": str(limit)})
    eventually(lambda: passed(made), 60)
    database = Database(database_url)
    if database.path is None:
        # The files of PostgreSQL are larger than the limit for other reasons; the points are what counts.
        assert left(database) == {"oldest": (0, 0), "older": (CHUNKS, 0), "old": (CHUNKS, 0)}
    else:
        assert left(database)["oldest"] == (0, 0)
        assert left(database)["old"][0] == CHUNKS
    made.stop()
    tiny = {"GRADIOMETER_RETENTION_MAX_BYTES": "1", "GRADIOMETER_RETENTION_DELETE_FOR_SPACE": "1"}
    with database.write() as conn:
        conn.execute(update(run).where(run.c.public_id == "old").values(heartbeat_s=time.time() + 600))
    again = server(database_url, environment=tiny)
    with WireClient(again.url, "live") as agent:
        agent.hello()
        agent.send(scalar_schema("loss"), frame({1: [1.0]}))
        eventually(lambda: figures(again)["runs_deleted"] == 2, 60)
        eventually(lambda: figures(again)["runs_purged"] == 2, 60)
        assert set(left(database)) == {"old", "live"}
        assert left(database)["old"][0] == CHUNKS
        agent.send(frame({2: [2.0]}))
    with database.read() as conn:
        assert conn.execute(select(func.count()).select_from(deleted_run)).scalar_one() == 2
    database.close()


def test_without_settings_nothing_is_lost(server: Callable[..., Server], sqlite_url: str) -> None:
    database = open_database(sqlite_url, clock=SystemClock())
    old_run(database, "ancient", 4000)
    database.close()
    made = server(sqlite_url)
    eventually(lambda: passed(made), 60)
    database = Database(sqlite_url)
    assert left(database) == {"ancient": (CHUNKS, 1)}
    database.close()


def spaces(*rows: tuple[str, float, int, int, int]) -> list[RunSpace]:
    return [
        RunSpace(
            run_key=place, run_id=name, tags=("keep",) if name == "kept" else (), updated_s=-days * DAY_S,
            is_thinned=False, raw_bytes=raw, detail_bytes=small, rest_bytes=rest,
        )
        for place, (name, days, raw, small, rest) in enumerate(rows)
    ]  # fmt: skip


def test_no_more_is_given_up_than_is_needed() -> None:
    runs = spaces(("kept", 90, 100, 100, 100), ("a", 9, 100, 10, 5), ("b", 8, 100, 10, 5))

    def lost(max_bytes: int, *, delete: bool = True) -> list[str]:
        retention = Retention(max_bytes=max_bytes, delete_for_space=delete)
        return [f"{due.loss} {due.run.run_id}" for due in due_by_size(runs, retention, 530)]

    assert lost(530) == []
    assert lost(525) == ["detail a"]
    assert lost(515) == ["detail a", "detail b"]
    assert lost(500) == ["detail a", "detail b", "thin a"]
    assert lost(305) == ["detail a", "detail b", "thin a", "thin b", "delete a"]
    assert lost(305, delete=False) == ["detail a", "detail b", "thin a", "thin b"]
    assert lost(1)[-1] == "delete b"


def test_ages() -> None:
    runs = spaces(("kept", 90, 1, 1, 1), ("a", 9, 1, 1, 1), ("b", 2, 1, 1, 1), ("c", 0.5, 1, 1, 1))
    retention = Retention(detail_days=1, thin_days=5, delete_days=80)
    assert [(due.loss, due.run.run_id) for due in due_by_age(runs, retention, 0.0)] == [
        ("detail", "a"), ("thin", "a"), ("detail", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("DETAIL_DAYS", "soon", "RETENTION_DETAIL_DAYS is 'soon'"), ("THIN_DAYS", "-1", "THIN_DAYS"), ("DELETE_DAYS", "0", "DELETE_DAYS"),
        ("THIN_DAYS", "nan", "THIN_DAYS"), ("MAX_BYTES", "10GB", "GiB"), ("MAX_BYTES", "0", "MAX_BYTES"),
        ("DELETE_FOR_SPACE", "yes", "0 or 1"), ("DETIAL_DAYS", "1", "DETIAL_DAYS"), ("INTERVAL_S", "inf", "INTERVAL_S"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_used_is_named(name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        retention_from({"GRADIOMETER_RETENTION_" + name: text})


def test_settings() -> None:
    environment = {"DETAIL_DAYS": "1.5", "MAX_BYTES": "1.5 GiB", "DELETE_FOR_SPACE": "1", "THIN_DAYS": " "}
    found = retention_from({"GRADIOMETER_RETENTION_" + name: text for name, text in environment.items()})
    assert found == Retention(detail_days=1.5, max_bytes=3 * 2**29, delete_for_space=True)
