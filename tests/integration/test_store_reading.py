"""Reading series on real databases: attempts, layers, tails, metrics, the check; SQLite and PostgreSQL alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.absent import ABSENT, is_absent
from gradiometer_server.errors import InvalidRequest, NotFound
from gradiometer_server.store import log, series
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.maintenance import check, stats
from gradiometer_server.store.query import SeriesReader
from gradiometer_server.store.series import SeriesKey
from gradiometer_server.summaries.codec import CorruptData
from tests.integration.stores import (
    LOSS,
    WAIT_S,
    flush,
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


def test_the_last_attempt_wins_from_its_start_step(database: Database) -> None:
    key = new_run(database, attempts=((1000, 0), (2000, 60)))
    old, new = new_series(database, key, 1, LOSS)[0], new_series(database, key, 2, LOSS)[0]
    flush(database, key, (old, tail(np.arange(1, 101), np.ones(100))), (new, tail([60, 61], [2.0, 2.0])))
    reader = SeriesReader(database, lambda _: {new.series_id: tail([62], [3.0])})
    steps, values = reader.raw(key, LOSS.key)
    assert steps.tolist() == list(range(1, 63))
    assert values[:, 0].tolist() == [1.0] * 59 + [2.0, 2.0, 3.0]
    found, first, last = reader.query(key, LOSS.key, buckets=1)
    assert (found.num_finite_BW.tolist(), found.max_BW.tolist(), first, last) == ([[62]], [[3.0]], 1, 62)
    assert reader.latest([key])[key].values == {"train/loss": 3.0}


def test_the_last_complete_step_stays_unless_the_next_attempt_speaks_of_it(database: Database) -> None:
    key = new_run(database, attempts=((1000, 0), (2000, 60)))
    val = SeriesKey(key="val/loss")
    old, new = new_series(database, key, 1, LOSS, val), new_series(database, key, 2, LOSS, val)
    flush(
        database,
        key,
        (old[0], tail(np.arange(1, 101), np.ones(100))),
        (old[1], tail([0, 50, 60, 70], np.ones(4))),
        (new[0], tail([70, 80], [2.0, 2.0])),
    )
    # Validation counts for itself, from 0 again.
    reader = SeriesReader(database, lambda _: {new[1].series_id: tail([0, 1], [2.0, 2.0])})
    assert reader.raw(key, LOSS.key)[0].tolist() == [*range(1, 61), 70, 80]
    steps, values = reader.raw(key, val.key)
    assert (steps.tolist(), values[:, 0].tolist()) == ([0, 1], [2.0, 2.0])
    whole, first, last = reader.query(key, LOSS.key, attempt=1)
    assert (whole.first_step_B.tolist(), first, last) == (list(range(1, 101)), 1, 100)
    assert reader.query(key, val.key, attempt=1)[0].first_step_B.tolist() == [0, 50, 60, 70]
    with pytest.raises(NotFound, match="train/loss of attempt 3"):
        reader.query(key, LOSS.key, attempt=3)


def test_an_older_launch_that_arrives_late_does_not_win(database: Database) -> None:
    key = new_run(database, attempts=((2000, 5), (1000, 0)))
    newer, older = new_series(database, key, 1, LOSS)[0], new_series(database, key, 2, LOSS)[0]
    flush(database, key, (newer, tail([5, 6], [2.0, 2.0])), (older, tail([3, 4, 5, 6], [1.0] * 4)))
    reader = SeriesReader(database, lambda _: {})
    steps, values = reader.raw(key, LOSS.key)
    assert (steps.tolist(), values[:, 0].tolist()) == ([3, 4, 5, 6], [1.0, 1.0, 2.0, 2.0])
    assert reader.latest([key])[key].values == {"train/loss": 2.0}


def test_an_attempt_without_a_start_step_takes_over_where_it_reports(database: Database) -> None:
    key = new_run(database, attempts=((1000, 0), (2000, 0)))
    old = new_series(database, key, 1, LOSS)[0]
    flush(database, key, (old, tail([1, 2, 3, 4], [1.0] * 4)))
    assert SeriesReader(database, lambda _: {}).raw(key, LOSS.key)[0].tolist() == [1, 2, 3, 4]
    new = new_series(database, key, 2, LOSS)[0]
    reader = SeriesReader(database, lambda _: {new.series_id: tail([3], [2.0])})
    steps, values = reader.raw(key, LOSS.key)
    assert (steps.tolist(), values[:, 0].tolist()) == ([1, 2, 3], [1.0, 1.0, 2.0])


def test_layers_over_attempts_with_other_layers(database: Database) -> None:
    key = new_run(database, attempts=((1000, 0), (2000, 3)))
    with database.write() as conn:
        one = series.ensure_layout(conn, key, ["a", "b"], [1, 2])
        assert series.ensure_layout(conn, key, ["a", "b"], [1, 2]).layout_id == one.layout_id
        two = series.ensure_layout(conn, key, ["b", "c"], [2, 3])
    old = new_series(
        database, key, 1, SeriesKey(key="layer/norm", kind="layer", width=2, layout_id=one.layout_id)
    )[0]
    new = new_series(
        database, key, 2, SeriesKey(key="layer/norm", kind="layer", width=2, layout_id=two.layout_id)
    )[0]
    flush(
        database,
        key,
        (old, tail([1, 2], [[1.0, 2.0], [1.0, np.nan]])),
        (new, tail([3], [[4.0, float(ABSENT)]])),
    )
    reader = SeriesReader(database, lambda _: {})
    layout, found = reader.layers(key, "norm", columns=100)
    assert layout == two
    assert found.first_step_B.tolist() == [1, 2, 3]
    assert found.num_finite_BW.tolist() == [[1, 0], [0, 0], [1, 0]]
    assert found.num_nan_BW.tolist() == [[0, 0], [1, 0], [0, 0]]
    assert np.array_equal(found.max_BW, [[2.0, np.nan], [np.nan, np.nan], [4.0, np.nan]], equal_nan=True)
    found = reader.layer_statistics_at(key, 2)
    step, at_layout, statistics = found.step, found.layout, found.values
    assert (step, at_layout, list(statistics)) == (2, one, ["norm"])
    assert statistics["norm"][0] == 1.0
    assert np.isnan(statistics["norm"][1])
    found = reader.layer_statistics_at(key, None)
    step, statistics = found.step, found.values
    assert step == 3
    assert is_absent(statistics["norm"]).tolist() == [False, True]
    with pytest.raises(NotFound, match="step"):
        reader.layer_statistics_at(key, 0)


def test_a_wide_series_shows_one_layers_nan_at_every_zoom(database: Database) -> None:
    key = new_run(database)
    with database.write() as conn:
        layout = series.ensure_layout(conn, key, [f"l{i}" for i in range(148)], [1] * 148)
    (one,) = new_series(
        database, key, 1, SeriesKey(key="layer/norm", kind="layer", width=148, layout_id=layout.layout_id)
    )
    values = np.random.default_rng(0).standard_normal((2000, 148))
    values[777, 33] = np.nan
    values[1500, 99] = 1e9
    flush(database, key, (one, tail(np.arange(1, 1901), values[:1900])))
    reader = SeriesReader(database, lambda _: {one.series_id: tail(np.arange(1901, 2001), values[1900:])})
    for columns in (1, 7, 100, 1000, 5000):
        _, found = reader.layers(key, "norm", columns=columns)
        assert len(found.first_step_B) <= columns
        place = np.searchsorted(found.first_step_B, 778, side="right") - 1
        assert found.num_nan_BW[place, 33] == 1
        assert found.num_nan_BW.sum() == 1
        place = np.searchsorted(found.first_step_B, 1501, side="right") - 1
        assert found.max_BW[place, 99] == 1e9
        assert (found.num_finite_BW.sum(axis=0) + found.num_nan_BW.sum(axis=0) == 2000).all()


def test_metrics_join_attempts_ranks_and_tails(database: Database) -> None:
    key = new_run(database, attempts=((1000, 0), (2000, 10)))
    merged, ranked, hidden = new_series(
        database, key, 1, LOSS, SeriesKey(key="train/loss", rank=1), SeriesKey(key="_time")
    )
    (later,) = new_series(database, key, 2, LOSS)
    flush(
        database,
        key,
        (merged, tail([1, 2], [5.0, np.nan])),
        (ranked, tail([1], [1.0])),
        (hidden, tail([1], [1.0])),
    )
    reader = SeriesReader(database, lambda _: {later.series_id: tail([10, 11], [7.0, np.inf])})
    (metric,) = reader.metrics(key)
    assert (metric.name, metric.kind, metric.ranks, metric.num_points) == ("train/loss", "scalar", (1,), 4)
    assert (metric.first_step, metric.last_step, metric.last) == (1, 11, math.inf)
    assert (metric.min, metric.max, metric.num_nonfinite) == (5.0, 7.0, 2)


def test_a_tail_that_was_flushed_while_a_read_began_counts_once(database: Database) -> None:
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    flush(database, key, (one, tail([1, 2, 3], [5.0, np.nan, np.inf])))
    # As taken before the flush, and a step more.
    reader = SeriesReader(
        database, lambda _: {one.series_id: tail([1, 2, 3, 4], [5.0, np.nan, np.inf, np.nan])}
    )
    (metric,) = reader.metrics(key)
    assert (metric.num_points, metric.num_nonfinite) == (4, 3)


def test_questions_that_cannot_be_answered_say_why(database: Database) -> None:
    key = new_run(database)
    new_series(database, key, 1, LOSS)
    reader = SeriesReader(database, lambda _: {})
    with pytest.raises(NotFound, match="nothing/here"):
        reader.query(key, "nothing/here")
    with pytest.raises(NotFound, match="rank 3"):
        reader.query(key, LOSS.key, 3)
    with pytest.raises(InvalidRequest, match="ends at 1"):
        reader.query(key, LOSS.key, None, 2, 1)
    with pytest.raises(InvalidRequest, match="buckets"):
        reader.query(key, LOSS.key, buckets=0)
    assert len(reader.raw(key, LOSS.key, None, -(10**30), 10**30)[0]) == 0
    with pytest.raises(NotFound, match="layer"):
        reader.layer_statistics_at(key, 10**30)
    found, first, last = reader.query(key, LOSS.key, None, -(10**30), 10**30)
    assert (len(found.first_step_B), first, last) == (0, None, None)


def test_stats_and_check(database: Database, writer: log.LogWriter) -> None:
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    writer.submit(key, 1, 1, records(1, 5), 5).result(WAIT_S)
    flush(database, key, (one, tail(np.arange(10_000), np.arange(10_000.0))), folded={1: 2})
    found = stats(database)
    assert (found.num_runs, found.num_series, found.num_points, found.num_frames, found.num_chunks) == (
        1,
        1,
        10_000,
        3,
        3,
    )
    assert found.file_bytes > 0
    newest = max(path.name for path in Path("migrations/versions").glob("[0-9]*.py"))
    assert newest.startswith(found.revision)
    assert list(check(database)) == []
    with database.write() as conn:
        conn.exec_driver_sql("UPDATE series SET num_points = 3")
        conn.exec_driver_sql("DELETE FROM frame WHERE seq = 4")
        conn.exec_driver_sql("UPDATE chunk SET data = summary WHERE step0 = 4096")
        conn.exec_driver_sql("UPDATE chunk SET step1 = 4097 WHERE step0 = 0")
    wrong = [f"{problem.where}: {problem.what}" for problem in check(database)]
    assert len(wrong) == 5
    assert "source 1: 1 records are acknowledged" in wrong[0]
    assert "num_points 3" in wrong[1]
    assert "its steps end at 4095, but its row says 4097" in wrong[2]
    assert "chunk at step 4096: overlaps" in wrong[3]
    assert "chunk at step 4096" in wrong[4]
    with pytest.raises(CorruptData, match="train/loss, attempt 1, chunk at step 0"):
        SeriesReader(database, lambda _: {}).raw(key, LOSS.key)
