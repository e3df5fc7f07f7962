"""The store on real databases: every promise of writing holds on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from sqlalchemy import text

from gradiometer import wire
from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.absent import ABSENT
from gradiometer_server.errors import InvalidRequest, NotFound, ProtocolError, StoreUnavailable
from gradiometer_server.store import alerts, chunks, log, runs, series
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.maintenance import check
from gradiometer_server.store.query import SeriesReader
from gradiometer_server.store.series import SeriesKey
from tests.integration.stores import (
    LOSS,
    SCHEMA,
    WAIT_S,
    bits,
    flush,
    info,
    new_run,
    new_series,
    records,
    tail,
)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = open_database(database_url, clock=SystemClock())
    yield opened
    opened.close()


@pytest.fixture
def writer(database: Database) -> Iterator[log.LogWriter]:
    made = log.LogWriter(database)
    made.start()
    yield made
    made.stop(WAIT_S)


# ---- transactions


def test_a_snapshot_does_not_see_later_writes(database: Database) -> None:
    with database.read() as conn:
        assert runs.list_runs(conn, now_s=1.0).runs == ()
        new_run(database)
        assert runs.list_runs(conn, now_s=1.0).runs == ()
    with database.read() as conn:
        assert len(runs.list_runs(conn, now_s=1.0).runs) == 1


def test_a_failed_transaction_writes_nothing(database: Database) -> None:
    with pytest.raises(ZeroDivisionError), database.write() as conn:
        runs.ensure_run(conn, info(), 1 / 0 if runs.ensure_run(conn, info(), 1.0) else 1.0)
    with database.read() as conn:
        assert runs.list_runs(conn, now_s=1.0).runs == ()


def test_a_write_inside_a_write_is_refused_instead_of_hanging(database: Database) -> None:
    with database.write(), pytest.raises(RuntimeError, match="for itself"), database.write():
        pass
    new_run(database)


@pytest.mark.postgres
def test_a_lost_connection_is_said_and_the_next_one_works(postgres_url: str) -> None:
    database = open_database(postgres_url, clock=SystemClock())
    end_me = text("SELECT pg_terminate_backend(pg_backend_pid())")
    for door in (database.read, database.write):
        with pytest.raises(StoreUnavailable, match="terminating connection") as caught, door() as conn:
            conn.execute(end_me)
        assert caught.value.remedy
    new_run(database)
    with database.read() as conn:
        assert len(runs.list_runs(conn, now_s=1.0).runs) == 1
    database.close()


# ---- runs and sources


def test_a_run_is_made_once_and_merges_config(database: Database) -> None:
    with database.write() as conn:
        runs.ensure_run(conn, info(config={"lr": 0.1, "bad": math.nan, "big": 2**70}, tags=("a",)), 10.0)
        again = runs.ensure_run(
            conn, info(name="other", config={"lr": 0.2, "x": "\x00é"}, tags=("b", "a")), 20.0
        )
    assert again.name == "n"
    assert again.config.keys() == {"lr", "bad", "big", "x"}
    assert (again.config["lr"], again.config["big"], again.config["x"]) == (0.2, 2**70, "\x00é")
    assert math.isnan(again.config["bad"])
    assert again.tags == ("a", "b")
    assert again.updated_s == 20.0
    with database.read() as conn:
        assert runs.get_run(conn, "r", 20.0).tags == ("a", "b")
        with pytest.raises(NotFound, match="nobody"):
            runs.get_run(conn, "nobody", 20.0)


def test_a_run_id_of_another_project_is_refused(database: Database) -> None:
    new_run(database)
    with (
        pytest.raises(ProtocolError, match="belongs to project 'p', not to 'q'") as caught,
        database.write() as conn,
    ):
        runs.ensure_run(conn, info(project="q"), 1.0)
    assert caught.value.code == "run_in_other_project"


def test_sources_are_found_again_and_attempts_numbered(database: Database) -> None:
    key = new_run(database, attempts=((2000, 0), (3000, 50)))
    with database.write() as conn:
        first = runs.ensure_source(conn, key, wire.SourceInfo(rank=0, attempt=2000, start_step=7), 2.0)
        other = runs.ensure_source(conn, key, wire.SourceInfo(rank=1, attempt=3000, world_size=2), 2.0)
    assert (first.source_id, first.ordinal, first.start_step) == (1, 1, 0)
    assert (other.source_id, other.ordinal, other.acked_seq, other.folded_seq, other.closed) == (
        3,
        2,
        0,
        0,
        False,
    )
    with pytest.raises(ProtocolError, match="two processes") as caught, database.write() as conn:
        runs.ensure_source(conn, key, wire.SourceInfo(rank=0, attempt=2000, host="other"), 2.0)
    assert caught.value.code == "second_writer"
    with database.read() as conn:
        run = runs.get_run(conn, "r", 2.0)
        assert [row.source_id for row in runs.list_sources(conn, key)] == [1, 2, 3]
    assert (run.attempts, run.world_size) == (2, 2)
    with pytest.raises(ProtocolError, match="start_step -1"), database.write() as conn:
        runs.ensure_source(conn, key, wire.SourceInfo(rank=0, attempt=1, start_step=-1), 2.0)


KILLED = {"code": None, "signal": "SIGKILL", "reason": "killed", "inferred": True}
DONE = {"code": 0, "signal": None, "reason": "", "inferred": False}
FAILED = {"code": 1, "signal": None, "reason": "ValueError", "inferred": False}
VANISHED = {"code": None, "signal": None, "reason": "", "inferred": True}


@pytest.mark.parametrize(
    ("exits", "now_s", "state"),
    [
        ({}, 31.0, "running"),
        ({}, 31.5, "lost"),
        ({0: DONE}, 31.0, "running"),
        ({0: DONE}, 40.0, "lost"),
        ({0: DONE, 1: DONE}, 400.0, "finished"),
        ({0: DONE, 1: FAILED}, 400.0, "failed"),
        ({1: FAILED}, 2.0, "failed"),
        ({0: FAILED, 1: KILLED}, 400.0, "crashed"),
        ({1: VANISHED}, 2.0, "crashed"),
    ],
)
def test_state_of_a_run(
    database: Database, exits: dict[int, dict[str, object]], now_s: float, state: str
) -> None:
    with database.write() as conn:
        key = runs.ensure_run(conn, info(), 1.0).run_key
        old = runs.ensure_source(conn, key, wire.SourceInfo(rank=0, attempt=1), 1.0)
        runs.set_exit(conn, key, old.source_id, KILLED, 1.0)
        sources = [
            runs.ensure_source(conn, key, wire.SourceInfo(rank=r, attempt=2, world_size=2), 1.0)
            for r in (0, 1)
        ]
        for rank, exit in exits.items():
            runs.set_exit(conn, key, sources[rank].source_id, exit, 1.5)
    with database.read() as conn:
        run = runs.get_run(conn, "r", now_s)
        assert run.state == state
        assert [found.id for found in runs.list_runs(conn, state=run.state, now_s=now_s).runs] == ["r"]
        others = [other for other in ("running", "finished", "failed", "crashed", "lost") if other != state]
        assert all(not runs.list_runs(conn, state=other, now_s=now_s).runs for other in others)  # type: ignore[arg-type]
    assert (run.finished_s is None) == (state in ("running", "lost"))
    if state == "crashed":
        assert run.exit is not None
        assert run.exit["signal"] == (exits[1]["signal"])


def test_a_lost_run_recovers_with_a_heartbeat(database: Database) -> None:
    key = new_run(database)
    with database.write() as conn:
        assert runs.get_run(conn, "r", 100.0).state == "lost"
        runs.heartbeat(conn, key, 100.0, {1: 7})
        runs.heartbeat(conn, key, 90.0, {1: 3})
        run = runs.get_run(conn, "r", 100.0)
    assert (run.state, run.heartbeat_s, run.dropped_reports) == ("running", 100.0, 7)


def test_counters_and_unavailable_metrics(database: Database) -> None:
    key = new_run(database)
    with database.write() as conn:
        runs.count_rejected(conn, key, 2, "first")
        runs.count_rejected(conn, key, 1, "name\x00 empty")
        runs.add_unavailable(conn, key, "memory/allocated_bytes", "no CUDA device")
        runs.add_unavailable(conn, key, "scaler/scale", "no scaler")
        run = runs.get_run(conn, "r", 1.0)
    assert (run.rejected_records, run.last_rejection) == (3, "name\ufffd empty")
    assert run.unavailable == {"memory/allocated_bytes": "no CUDA device", "scaler/scale": "no scaler"}


def test_pages_of_runs_newest_first(database: Database) -> None:
    with database.write() as conn:
        for number in range(25):
            name = "Größe 50%" if number == 7 else f"n{number}"
            runs.ensure_run(
                conn,
                info(f"r{number}", name=name, created_s=float(number // 2), project=f"p{number % 2}"),
                1.0,
            )
    with database.read() as conn:
        seen: list[str] = []
        cursor = None
        while True:
            page = runs.list_runs(conn, limit=4, cursor=cursor, now_s=1.0)
            seen += [run.id for run in page.runs]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert len(page.runs) == 1
        assert sorted(seen) == sorted(f"r{n}" for n in range(25))
        created = [int(name[1:]) // 2 for name in seen]
        assert created == sorted(created, reverse=True)
        assert [run.id for run in runs.list_runs(conn, search="größe 50%", now_s=1.0).runs] == ["r7"]
        assert runs.list_runs(conn, search="50_", now_s=1.0).runs == ()
        assert len(runs.list_runs(conn, project="p1", now_s=1.0).runs) == 12
        assert runs.list_projects(conn) == ("p0", "p1")
        with pytest.raises(InvalidRequest, match="cursor"):
            runs.list_runs(conn, cursor="nonsense", now_s=1.0)
        with pytest.raises(InvalidRequest, match="cursor"):
            runs.list_runs(conn, cursor=f"1.0_{2**64}", now_s=1.0)
        with pytest.raises(InvalidRequest, match="limit"):
            runs.list_runs(conn, limit=0, now_s=1.0)


# ---- log


def acked(database: Database, key: int) -> int:
    with database.read() as conn:
        return runs.list_sources(conn, key)[0].acked_seq


def test_what_is_acknowledged_is_in_the_log_exactly_once(database: Database, writer: log.LogWriter) -> None:
    key = new_run(database)
    sent = records(1, 10)
    writer.submit(key, 1, 1, sent[:6], 6).result(WAIT_S)
    writer.submit(key, 1, 4, sent[3:], 10).result(WAIT_S)
    writer.submit(key, 1, 1, sent, 10).result(WAIT_S)
    with database.read() as conn:
        assert log.read_frames(conn, key, 1, 0, 10**6) == sent
        assert log.read_frames(conn, key, 1, 7, 10**6) == sent[7:]
        assert log.read_frames(conn, key, 1, 0, 1) == sent[:1]
        assert log.read_schemas(conn, key, 1) == [(1, SCHEMA)]
        assert log.sources_with_unfolded(conn) == [(key, 1)]
    assert acked(database, key) == 10


def test_refused_records_are_acknowledged_without_being_stored(
    database: Database, writer: log.LogWriter
) -> None:
    key = new_run(database)
    writer.submit(key, 1, 1, records(1, 2), 5).result(WAIT_S)
    with database.read() as conn:
        assert [seq for seq, _ in log.read_frames(conn, key, 1, 0, 10**6)] == [1, 2]
    assert acked(database, key) == 5


def test_a_hole_is_never_acknowledged(database: Database, writer: log.LogWriter) -> None:
    key = new_run(database)
    with pytest.raises(StoreUnavailable, match="not written"):
        writer.submit(key, 1, 2, records(2, 3), 3).result(WAIT_S)
    with pytest.raises(StoreUnavailable, match="unknown"):
        writer.submit(key, 9, 1, records(1, 1), 1).result(WAIT_S)
    assert acked(database, key) == 0


def test_a_resend_of_folded_records_does_not_come_back(database: Database, writer: log.LogWriter) -> None:
    key = new_run(database)
    writer.submit(key, 1, 1, records(1, 5), 5).result(WAIT_S)
    flush(database, key, folded={1: 5})
    writer.submit(key, 1, 1, records(1, 6), 6).result(WAIT_S)
    with database.read() as conn:
        assert [seq for seq, _ in log.read_frames(conn, key, 1, 0, 10**6)] == [6]
        assert log.read_schemas(conn, key, 1) == [(1, SCHEMA)]
    assert list(check(database)) == []


def test_many_submissions_share_few_commits(database: Database, writer: log.LogWriter) -> None:
    key = new_run(database)
    futures = [writer.submit(key, 1, seq, records(seq, seq), seq) for seq in range(1, 301)]
    for future in futures:
        future.result(WAIT_S)
    assert acked(database, key) == 300
    assert writer.num_commits < 100


# ---- chunks and series


def test_values_come_back_bit_for_bit_from_chunks(database: Database) -> None:
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    odd = [
        0x7FF8000000000001,
        0xFFF0000000000000,
        0x8000000000000000,
        1,
        0x7FF0000000000000,
        0x3FF8000000000000,
    ]
    values = np.array(odd * 1000, np.uint64).view(np.float64)
    flush(database, key, (one, tail(np.arange(len(values)), values)))
    steps, back = SeriesReader(database, lambda _: {}).raw(key, LOSS.key)
    assert bits(back) == odd * 1000
    assert steps.tolist() == list(range(6000))


def test_statistics_tell_nan_infinity_and_absence_apart(database: Database) -> None:
    key = new_run(database)
    names = [SeriesKey(key=f"m{i}") for i in range(4)]
    made = new_series(database, key, 1, *names)
    lasts = [math.nan, math.inf, float(ABSENT), -0.0]
    flush(
        database,
        key,
        *[(one, tail([1, 2, 3], [1.0, 5.0, last])) for one, last in zip(made, lasts, strict=True)],
    )
    with database.read() as conn:
        rows = series.list_series(conn, key)
        run = runs.get_run(conn, "r", 1.0)
    assert [row.num_nonfinite for row in rows] == [1, 1, 0, 0]
    assert [(row.num_points, row.first_step, row.last_step, row.max) for row in rows] == [(3, 1, 3, 5.0)] * 4
    assert math.isnan(rows[0].last or 0)
    assert (rows[1].last, rows[2].last) == (math.inf, None)
    assert math.copysign(1.0, rows[3].last if rows[3].last is not None else 1.0) == -1.0
    assert run.latest.keys() == {"m0", "m1", "m3"}
    assert run.last_step == 3


def test_a_late_step_replaces_and_statistics_follow(database: Database) -> None:
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    values = np.ones(10_000)
    values[5_000] = 1e6
    values[6_000] = np.nan
    flush(database, key, (one, tail(np.arange(10_000), values)))
    flush(database, key, (one, tail([6_000, 5_000, 5_000], [2.0, 9.0, 0.5])))
    with database.read() as conn:
        (row,) = series.list_series(conn, key)
    assert (row.num_points, row.max, row.min, row.num_nonfinite, row.last) == (10_000, 2.0, 0.5, 0, 1.0)
    assert list(check(database)) == []


def test_series_ids_are_given_once(database: Database) -> None:
    key = new_run(database, attempts=((1, 0), (2, 10)))
    ranked = SeriesKey(key="train/loss", rank=0)
    first = new_series(database, key, 1, LOSS, ranked)
    again = new_series(database, key, 1, ranked, LOSS, SeriesKey(key="new"))
    second = new_series(database, key, 2, LOSS)
    assert [one.series_id for one in first] == [1, 2]
    assert [one.series_id for one in again] == [2, 1, 3]
    assert second[0].series_id == 4


def test_a_plan_that_another_flush_overtook_is_refused_and_changes_nothing(database: Database) -> None:
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    plans = [chunks.plan_flush(database, key, [(one, tail([step], [1.0]))]) for step in (1, 2)]
    with database.write() as conn:
        chunks.commit_flush(conn, plans[0], folded={})
    with pytest.raises(chunks.FlushConflict), database.write() as conn:
        chunks.commit_flush(conn, plans[1], folded={})
    assert SeriesReader(database, lambda _: {}).raw(key, LOSS.key)[0].tolist() == [1]


def test_the_fold_offset_moves_with_the_chunks_or_not_at_all(
    database: Database, writer: log.LogWriter
) -> None:
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    writer.submit(key, 1, 1, records(1, 5), 5).result(WAIT_S)
    plan = chunks.plan_flush(database, key, [(one, tail([1], [1.0]))])
    with pytest.raises(chunks.FlushConflict, match="cannot move its fold offset"), database.write() as conn:
        chunks.commit_flush(conn, plan, folded={1: 6})
    with database.write() as conn:
        states = {("grad_norm_spike", ""): {"mean": math.nan}, ("non_finite", "a"): [1]}
        chunks.commit_flush(conn, plan, folded={1: 4}, rule_states=states, last_steps={1: 4})
    with database.write() as conn:
        empty = chunks.plan_flush(database, key, {})
        chunks.commit_flush(conn, empty, folded={1: 4}, rule_states={("non_finite", "a"): None})
    with database.read() as conn:
        assert [seq for seq, _ in log.read_frames(conn, key, 1, 0, 10**6)] == [5]
        loaded = alerts.load_rule_states(conn, key)
        row = runs.list_sources(conn, key)[0]
    assert list(loaded) == [("grad_norm_spike", "")]
    assert math.isnan(loaded["grad_norm_spike", ""]["mean"])
    assert (row.folded_seq, row.last_step) == (4, 4)
