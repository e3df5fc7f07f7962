"""Every spike and every value that is not finite is in its own bucket, over every x axis, range and number of buckets.

As `test_query_never_hides`: a real SQLite file with small chunks and windows, and a loop as the reference.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradiometer.wire import RunInfo, SourceInfo
from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.series import Series, Tail
from gradiometer_server.store import chunks, runs
from gradiometer_server.store.charts import ChartReader, Wanted
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.drawing import Chart, Drawn
from gradiometer_server.store.lines import LineRef
from gradiometer_server.store.points import PointReader
from gradiometer_server.store.series import SeriesKey, ensure_series

BEGAN_S = 1_800_000_000.5
Stream = list[tuple[int, float]]
numbers = itertools.count(1)
odd = st.sampled_from([math.nan, math.inf, -math.inf])
values = st.floats(-100, 100) | odd | st.sampled_from([1e300, -1e300, 5e-324, 1e-320])
steps = st.integers(0, 300)
streams = st.lists(st.tuples(steps, values), min_size=1, max_size=60)
xs = st.lists(st.tuples(steps, st.floats(-50, 1000) | odd), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("gradiometer_server.store.chunks.chunk_capacity", return_value=8),
        mock.patch("gradiometer_server.summaries.buckets.POINTS_PER_WINDOW", 2),
    ):
        opened = open_database(f"sqlite:///{Path(folder) / 'a.db'}", clock=SystemClock())
        yield opened
        opened.close()


def new_run(database: Database, *names: str) -> dict[str, Series]:
    with database.write() as conn:
        run = runs.ensure_run(
            conn, RunInfo(run_id=f"r{next(numbers)}", project="p", name="n", created_s=1.0), 1.0
        )
        runs.ensure_source(conn, run.run_key, SourceInfo(rank=0, attempt=1, started_s=BEGAN_S), 1.0)
        keys = [SeriesKey(key=name) for name in names]
        made = ensure_series(conn, run.run_key, 1, keys)
        return {key.key: made[key] for key in keys}


def tail_of(stream: Stream) -> Tail:
    return Tail(
        steps_N=np.array([s for s, _ in stream], np.int64),
        values_NW=np.array([v for _, v in stream], np.float64).reshape(-1, 1),
    )


def store(database: Database, one: Series, stream: Stream, share: int) -> Tail:
    """The first `share` % of the stream goes into chunks; the rest is returned as a tail."""
    cut = len(stream) * share // 100
    if cut:
        plan = chunks.plan_flush(database, one.run_key, [(one, tail_of(stream[:cut]))])
        with database.write() as conn:
            chunks.commit_flush(conn, plan, folded={})
    return tail_of(stream[cut:])


def placed(stream: Stream, known: Stream, origin: float) -> dict[int, tuple[float, float]]:
    """Step -> (x, value): x of the step, or of the last step before it that has one, or the first of all."""
    finite = {step: x for step, x in sorted(dict(known).items()) if math.isfinite(x)}
    found = {}
    for step, value in sorted(dict(stream).items()):
        before = [s for s in finite if s <= step]
        if finite:
            found[step] = (finite[max(before) if before else min(finite)] - origin, value)
    return found


def check(drawn: Drawn, expected: dict[int, tuple[float, float]], asked: int) -> None:
    assert drawn.error is None, drawn.error
    assert drawn.buckets is not None
    assert drawn.x_B is not None
    count = len(drawn.x_B)
    assert count <= asked
    found = drawn.buckets
    if len(expected) <= asked:
        assert drawn.width == 0
        got = dict(zip(found.first_step_B.tolist(), drawn.x_B.tolist(), strict=True))
        assert got == {step: x for step, (x, _) in expected.items()}
        groups = [[(step, *pair)] for step, pair in sorted(expected.items())]
    else:
        by_place: dict[int, list[tuple[int, float, float]]] = {}
        for step, (x, value) in sorted(expected.items()):
            place = math.floor(Fraction(x) / Fraction(drawn.width))
            by_place.setdefault(place, []).append((step, x, value))
        groups = [some for _, some in sorted(by_place.items())]
        assert [math.floor(Fraction(x) / Fraction(drawn.width)) for x in drawn.x_B.tolist()] == sorted(
            by_place
        )
    for place, group in enumerate(groups):
        finite = [value for _, _, value in group if math.isfinite(value)]
        assert found.first_step_B[place] == group[0][0]
        assert found.num_finite_BW[place, 0] == len(finite)
        assert found.num_nan_BW[place, 0] == sum(math.isnan(v) for _, _, v in group)
        assert found.num_pos_inf_BW[place, 0] == sum(v == math.inf for _, _, v in group)
        assert found.num_neg_inf_BW[place, 0] == sum(v == -math.inf for _, _, v in group)
        if finite:
            assert (found.min_BW[place, 0], found.max_BW[place, 0]) == (min(finite), max(finite))


ranges = st.tuples(st.none() | st.floats(-60, 1100), st.none() | st.floats(-60, 1100))


@settings(max_examples=60, deadline=None)
@given(
    streams, xs, st.integers(0, 100), st.integers(0, 100), st.sampled_from(["metric", "time", "relative_time"]),
    st.lists(st.tuples(ranges, st.integers(4, 50)), min_size=1, max_size=6),
)  # fmt: skip
def test_every_value_is_in_its_bucket_over_any_axis(
    database: Database, stream: Stream, known: Stream, share: int, x_share: int,
    kind: Literal["metric", "time", "relative_time"], questions: list[tuple[tuple[float | None, float | None], int]],
) -> None:  # fmt: skip
    name = "tokens" if kind == "metric" else "_time"
    made = new_run(database, "loss", name)
    key = made["loss"].run_key
    tails = {
        made["loss"].series_id: store(database, made["loss"], stream, share),
        made[name].series_id: store(database, made[name], known, x_share),
    }
    reader = ChartReader(database, lambda _: tails)
    origin = BEGAN_S if kind == "relative_time" else 0.0
    whole = placed(stream, known, origin)
    for (low, high), asked in [((None, None), 4), ((None, None), 100), *questions]:
        first, last = (high, low) if low is not None and high is not None and low > high else (low, high)
        # What is near to the origin is asked for where the points are.
        first, last = (None if end is None else end - origin for end in (first, last))
        chart = Chart(
            axis=kind, metric=name if kind == "metric" else None, first=first, last=last, buckets=asked
        )
        ((drawn,),) = reader.draw([Wanted(refs=(LineRef(run_key=key, key="loss"),))], chart)
        if not whole:
            assert drawn.error is not None or not len(drawn.x_B)
            continue
        inside = {
            step: (x, value)
            for step, (x, value) in whole.items()
            if (first is None or x >= first) and (last is None or x <= last)
        }
        check(drawn, inside, asked)


@settings(max_examples=40, deadline=None)
@given(
    streams,
    st.integers(0, 100),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 80),
    st.sampled_from([0.5, 0.9]),
)
def test_smoothing_is_the_same_in_every_range(
    database: Database, stream: Stream, share: int, one_end: int, other: int, asked: int, weight: float
) -> None:
    made = new_run(database, "loss")["loss"]
    tails = {made.series_id: store(database, made, stream, share)}
    reader = ChartReader(database, lambda _: tails)
    wanted = [Wanted(refs=(LineRef(run_key=made.run_key, key="loss"),))]
    ((whole,),) = reader.draw(wanted, Chart(buckets=1000, smoothing=weight))
    first, last = sorted((one_end, other))
    ((part,),) = reader.draw(wanted, Chart(first=first, last=last, buckets=asked, smoothing=weight))
    assert whole.buckets is not None
    assert part.buckets is not None
    assert whole.smoothed_B is not None
    assert part.smoothed_B is not None
    assert whole.width == 1
    exact = dict(zip(whole.buckets.first_step_B.tolist(), whole.smoothed_B.tolist(), strict=True))
    for step, found in zip(part.buckets.first_step_B.tolist(), part.smoothed_B.tolist(), strict=True):
        bucket = int(step // part.width)
        inside = [
            value for s, value in exact.items()
            if s // part.width == bucket and first <= s <= last and not math.isnan(value)
        ]  # fmt: skip
        if inside:
            shares = math.fsum(value / len(inside) for value in inside)
            assert math.isclose(
                found, shares, rel_tol=1e-6, abs_tol=max(1e-300, 1e-9 * max(map(abs, inside)))
            )
        else:
            assert math.isnan(found)


@settings(max_examples=60, deadline=None)
@given(streams, st.integers(0, 100), st.integers(1, 30), st.integers(0, 300), st.integers(0, 300))
def test_pages_of_any_size_hold_every_point_once(
    database: Database, stream: Stream, share: int, limit: int, one_end: int, other: int
) -> None:
    made = new_run(database, "loss")["loss"]
    tails = {made.series_id: store(database, made, stream, share)}
    reader = PointReader(database, lambda _: tails)
    first, last = sorted((one_end, other))
    expected = [(s, repr(v)) for s, v in sorted(dict(stream).items()) if first <= s <= last]
    ref = LineRef(run_key=made.run_key, key="loss")
    found: list[tuple[int, str]] = []
    begin, more = 0, True
    while more:
        page = reader.page(ref, first=first, last=last, begin=begin, limit=limit)
        assert page.total == len(expected)
        assert len(page.steps_N) <= limit
        found += zip(page.steps_N.tolist(), map(repr, page.values_N.tolist()), strict=True)
        more = page.more and len(page.steps_N) > 0
        begin = int(page.steps_N[-1]) + 1 if more else 0
    assert found == expected


@settings(max_examples=40, deadline=None)
@given(streams, st.integers(1, 30), st.data())
def test_who_follows_a_run_has_all_of_it(
    database: Database, stream: Stream, limit: int, data: st.DataObject
) -> None:
    made = new_run(database, "loss")["loss"]
    ref = LineRef(run_key=made.run_key, key="loss")
    seen: dict[int, str] = {}
    cursor, done = None, 0
    stored: Stream = []
    while done < len(stream):
        done = data.draw(st.integers(done + 1, len(stream)))
        stored = stream[:done]
        tails = {made.series_id: tail_of(stored)}
        more = True
        while more:
            news = PointReader(database, lambda _, tails=tails: tails).news(ref, cursor, limit)
            if news.reset:
                seen = {}
            seen.update(zip(news.steps_N.tolist(), map(repr, news.values_N.tolist()), strict=True))
            cursor, more = news.cursor, news.more
    expected = dict(sorted(dict(stored).items()))
    begin = min(seen)
    # A follower begins at the newest points, also after points came late; from there on nothing is missing.
    assert sorted(seen) == [step for step in expected if step >= begin]


def test_thinned_chunks_keep_their_extremes_over_every_axis(database: Database) -> None:
    made = new_run(database, "loss", "tokens")
    stream = [
        (step, 1e9 if step == 77 else math.nan if step == 40 else float(step % 7)) for step in range(200)
    ]
    store(database, made["loss"], stream, 100)
    store(database, made["tokens"], [(step, step * 8.0) for step in range(200)], 100)
    key = made["loss"].run_key
    with database.write() as conn:
        conn.exec_driver_sql(
            f"UPDATE chunk SET data = x'', steps = NULL WHERE run_id = {key} AND series_id = {made['loss'].series_id} AND step0 < 100"
        )
    reader = ChartReader(database, lambda _: {})
    for chart in (
        Chart(buckets=100),
        Chart(axis="metric", metric="tokens", buckets=100),
        Chart(buckets=1000),
    ):
        ((drawn,),) = reader.draw([Wanted(refs=(LineRef(run_key=key, key="loss"),))], chart)
        assert drawn.buckets is not None
        assert drawn.buckets.max_BW.max() == 1e9
        assert drawn.buckets.num_nan_BW.sum() == 1
        assert drawn.buckets.num_finite_BW.sum() == 199


def test_smoothing_of_what_is_left_survives_thinning_of_x(database: Database) -> None:
    made = new_run(database, "loss", "tokens")
    store(database, made["loss"], [(step, float(step % 7)) for step in range(200)], 100)
    store(database, made["tokens"], [(step, step * 8.0) for step in range(200)], 100)
    key = made["loss"].run_key
    reader = ChartReader(database, lambda _: {})
    wanted = [Wanted(refs=(LineRef(run_key=key, key="loss"),))]
    chart = Chart(axis="metric", metric="tokens", buckets=1000, smoothing=0.9)
    ((before,),) = reader.draw(wanted, chart)
    with database.write() as conn:
        conn.exec_driver_sql(
            f"UPDATE chunk SET data = x'', steps = NULL WHERE run_id = {key} AND series_id = {made['tokens'].series_id}"
        )
    ((after,),) = reader.draw(wanted, chart)
    assert before.smoothed_B is not None
    assert np.array_equal(before.smoothed_B, after.smoothed_B)
