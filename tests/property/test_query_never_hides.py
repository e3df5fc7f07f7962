"""Every spike, NaN and infinity is in its own bucket: at every zoom, range, split into chunks and mix with tails.

The reference is a dictionary of step -> value and a loop. The store is a real SQLite file, with chunks of at most
8 points instead of 4,096, so that few points make many chunks.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradiometer.wire import RunInfo, SourceInfo
from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.series import Buckets, Series, Tail
from gradiometer_server.store import chunks, runs
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.maintenance import check
from gradiometer_server.store.query import SeriesReader
from gradiometer_server.store.series import SeriesKey, ensure_series
from gradiometer_server.summaries import buckets
from gradiometer_server.summaries.partition import last_wins

CAPACITY = 8
odd_values = st.sampled_from(
    [math.nan, math.inf, -math.inf, 1e300, -1.7976931348623157e308, 1e-300, 1e-320, -5e-324, -0.0, 0.0]
)
values = st.floats(-100, 100) | odd_values | st.floats(width=32)
close = st.integers(0, 200)


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[int, float]]:
    """A run of steps with one stride, then points that repeat some of them, fill gaps or jump far ahead."""
    first, stride = draw(st.integers(0, 40)), draw(st.sampled_from([1, 2, 7]))
    count = draw(st.sampled_from([0, 1, 30, 64, 100]))
    # The first value is an extreme of its own, so that writing it again takes the series' extreme away.
    regular = [(first + stride * i, float(i % 13) if i else -999.0) for i in range(count)]
    late = draw(st.lists(st.tuples(close | st.integers(0, 5000), values), min_size=1, max_size=40))
    again = draw(st.lists(st.sampled_from(regular[:4] or [(0, 0.0)]), max_size=3))
    return regular + late + [(step, 500.0) for step, _ in again]


portions_of_100 = st.lists(st.integers(0, 100), max_size=5)
points = streams()


numbers = itertools.count(1)


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("gradiometer_server.store.chunks.chunk_capacity", return_value=CAPACITY),
        mock.patch("gradiometer_server.summaries.buckets.POINTS_PER_WINDOW", 2),
    ):
        opened = open_database(f"sqlite:///{Path(folder) / 'a.db'}", clock=SystemClock())
        yield opened
        opened.close()


def new_series(database: Database) -> Series:
    """A series of a run of its own: examples share the database, because making one takes longer than an example."""
    with database.write() as conn:
        run_id = f"run-{next(numbers)}"
        run = runs.ensure_run(conn, RunInfo(run_id=run_id, project="p", name="n", created_s=1.0), 1.0)
        runs.ensure_source(conn, run.run_key, SourceInfo(rank=0, attempt=1), 1.0)
        key = SeriesKey(key="train/loss")
        return ensure_series(conn, run.run_key, 1, [key])[key]


def tail_of(chosen: list[tuple[int, float]]) -> Tail:
    return Tail(
        steps_N=np.array([s for s, _ in chosen], np.int64),
        values_NW=np.array([v for _, v in chosen], np.float64).reshape(-1, 1),
    )


def flush(database: Database, one: Series, chosen: list[tuple[int, float]]) -> None:
    if chosen:
        plan = chunks.plan_flush(database, one.run_key, [(one, tail_of(chosen))])
        with database.write() as conn:
            chunks.commit_flush(conn, plan, folded={})


def split(chosen: list[tuple[int, float]], percents: list[int]) -> list[list[tuple[int, float]]]:
    edges = [0, *sorted(len(chosen) * percent // 100 for percent in percents), len(chosen)]
    return [chosen[a:b] for a, b in itertools.pairwise(edges)]


def check_buckets(found: Buckets, expected: dict[int, float], asked: int) -> None:
    assert len(found.first_step_B) <= asked
    assert found.width & (found.width - 1) == 0
    by_bucket: dict[int, list[tuple[int, float]]] = {}
    for step, value in sorted(expected.items()):
        by_bucket.setdefault(step // found.width, []).append((step, value))
    assert [int(step) // found.width for step in found.first_step_B] == list(by_bucket)
    for place, inside in enumerate(by_bucket.values()):
        finite = [value for _, value in inside if math.isfinite(value)]
        assert found.first_step_B[place] == inside[0][0]
        assert found.num_finite_BW[place, 0] == len(finite)
        assert found.num_nan_BW[place, 0] == sum(math.isnan(v) for _, v in inside)
        assert found.num_pos_inf_BW[place, 0] == sum(v == math.inf for _, v in inside)
        assert found.num_neg_inf_BW[place, 0] == sum(v == -math.inf for _, v in inside)
        if finite:
            assert found.min_BW[place, 0] == min(finite)
            assert found.max_BW[place, 0] == max(finite)
            mean = math.fsum(x / len(finite) for x in finite)
            size = max(abs(x) for x in finite)
            # Below the normal numbers a sum of shares loses up to one smallest step a point.
            assert abs(found.mean_BW[place, 0] - mean) <= 1e-12 * size + 5e-324 * len(finite)
        else:
            assert all(math.isnan(a[place, 0]) for a in (found.min_BW, found.max_BW, found.mean_BW))


@settings(max_examples=60, deadline=None)
@given(
    points,
    portions_of_100,
    st.lists(
        st.tuples(st.none() | close, st.none() | st.integers(0, 6000), st.integers(1, 300)),
        min_size=1,
        max_size=8,
    ),
)
def test_every_value_is_in_its_bucket(
    database: Database,
    stream: list[tuple[int, float]],
    cuts: list[int],
    questions: list[tuple[int | None, int | None, int]],
) -> None:
    portions = split(stream, cuts)
    one = new_series(database)
    for portion in portions[:-1]:
        flush(database, one, portion)
    tails = {one.series_id: tail_of(portions[-1])} if portions[-1] else {}
    reader = SeriesReader(database, lambda _: tails)
    expected = dict(stream)
    for low, high, asked in [(None, None, 1), (None, None, 9), (None, None, 40), *questions]:
        first, last = (low, high) if low is None or high is None or low <= high else (high, low)
        found, begin, end = reader.query(one.run_key, one.key, None, first, last, asked)
        inside = {
            s: v for s, v in expected.items() if (first is None or s >= first) and (last is None or s <= last)
        }
        check_buckets(found, inside, asked)
        assert (begin, end) == (min(expected), max(expected))
        steps, exact = reader.raw(one.run_key, one.key, None, first, last)
        assert dict(zip(steps.tolist(), map(repr, exact[:, 0].tolist()), strict=True)) == {
            s: repr(v) for s, v in inside.items()
        }


@settings(max_examples=40, deadline=None)
@given(points, portions_of_100, portions_of_100)
def test_any_portions_of_a_stream_end_with_the_same_bytes(
    database: Database, stream: list[tuple[int, float]], cuts: list[int], other_cuts: list[int]
) -> None:
    results = []
    for chosen in (cuts, other_cuts):
        one = new_series(database)
        for portion in split(stream, chosen):
            flush(database, one, portion)
        results.append(dump(database, one))
    assert results[0] == results[1]
    assert results[0]


def dump(database: Database, one: Series) -> list[tuple[object, ...]]:
    of_run = "FROM {} WHERE run_id = " + str(one.run_key)
    chunk_columns = (
        "step0, step1, n, stride, dtype, summary_width, min, max, num_nonfinite, summary, steps, data "
    )
    series_columns = "num_points, first_step, last_step, last, min, max, num_nonfinite "
    with database.read() as conn:
        rows = conn.exec_driver_sql(
            f"SELECT {chunk_columns}" + of_run.format("chunk") + " ORDER BY step0"
        ).all()
        return [
            tuple(r)
            for r in [*rows, *conn.exec_driver_sql(f"SELECT {series_columns}" + of_run.format("series"))]
        ]


def test_the_database_of_all_these_examples_passes_the_check(database: Database) -> None:
    with database.read() as conn:
        assert conn.exec_driver_sql("SELECT count(*) FROM chunk").scalar_one() > 0
    assert list(check(database)) == []


@given(
    points,
    st.integers(0, 6),
    portions_of_100,
    st.integers(0, 8),
)
def test_merging_finer_buckets_in_any_portions_is_the_same_as_making_coarse_ones(
    stream: list[tuple[int, float]], fine: int, cuts: list[int], more: int
) -> None:
    steps, exact = last_wins(tail_of(stream).steps_N, tail_of(stream).values_NW.astype(np.float64))
    edges = [0, *sorted(min(cut, len(steps)) for cut in cuts), len(steps)]
    parts = [buckets.bucketise(steps[a:b], exact[a:b], 1 << fine) for a, b in itertools.pairwise(edges)]
    merged = buckets.merge(list(reversed(parts)), 1 << (fine + more))
    check_buckets(merged, dict(zip(steps.tolist(), exact[:, 0].tolist(), strict=True)), 10**9)
