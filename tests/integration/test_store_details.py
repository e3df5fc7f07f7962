"""Rings in the store: kept once per record, per rank and attempt, and bounded per source, on both engines."""

from __future__ import annotations

import numpy as np
import pytest

from gradiometer import wire
from gradiometer_server.clock import SystemClock
from gradiometer_server.store import details, dumps, runs
from gradiometer_server.store.database import Database, open_database


def ring(*steps: int, rows: int = 2) -> wire.Detail:
    values = np.arange(len(steps) * rows * 7, dtype="<f8")
    return wire.Detail(
        kind="ring", reason="a\x00b", trigger_step=9, schema_id=2, steps=steps, times=tuple(map(float, steps)),
        values=values.tobytes(),
    )  # fmt: skip


def made(database_url: str) -> tuple[Database, int]:
    database = open_database(database_url, clock=SystemClock())
    with database.write() as conn:
        run = runs.ensure_run(conn, wire.RunInfo(run_id="r", project="p", name="n", created_s=1.0), 1.0)
        for rank in (0, 1):
            runs.ensure_source(conn, run.run_key, wire.SourceInfo(rank=rank, attempt=1, world_size=2), 1.0)
    return database, run.run_key


def test_a_record_is_kept_once_and_found_under_its_rank(database_url: str) -> None:
    database, key = made(database_url)
    for _ in range(2):
        with database.write() as conn:
            assert details.add_details(conn, key, [(1, 5, ring(3, 4)), (2, 5, ring(8))]) == 0
    with database.read() as conn:
        parts = details.list_parts(conn, key)
        steps = details.read_steps(conn, key, parts)
    assert [(part.rank, part.step0, part.step1, part.n) for part in parts] == [(0, 3, 4, 2), (1, 8, 8, 1)]
    assert "\x00" not in parts[0].reason
    assert steps == [], "a schema that is not there any more"
    database.close()


def test_what_a_source_may_keep_is_bounded_and_counted(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(details, "MAX_SOURCE_BYTES", 300)
    database, key = made(database_url)
    with database.write() as conn:
        given = [(1, 5, ring(1)), (1, 6, ring(2)), (1, 7, ring(3)), (2, 5, ring(1))]
        assert details.add_details(conn, key, given) == 1
        assert details.add_details(conn, key, given) == 1, "a replay stores nothing twice"
        assert len(details.list_parts(conn, key)) == 3
    database.close()


def test_dumps_are_kept_once_with_what_can_be_kept_of_them(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumps, "MAX_DUMPS", 3)
    database, key = made(database_url)
    told = {"path": "/d/step", "reason": "r" * 10_000, "host": None, "bytes": 2**80, "rank": "one"}
    with database.write() as conn:
        for step in (4, 4, 5, 6, 7):
            dumps.add_dump(conn, key, 1, step, float("nan"), told)
        found = dumps.list_dumps(conn, key)
    assert [row.step for row in found] == [4, 5, 6]
    assert (found[0].host, found[0].num_bytes, found[0].rank, found[0].saved_s) == ("", wire.MAX_STEP, 0, 0.0)
    assert len(found[0].reason) == 4096
    database.close()
