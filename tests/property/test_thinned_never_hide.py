"""Runs of several attempts of which any chunks lost their points: nothing drawn is hidden, nothing superseded comes back.

The reference knows all points, and which windows were left of the chunks that were thinned. What is drawn in a range must
hold at least the points that are drawn there, and at most those and all of the windows that reach into it.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from gradiometer_server.domain.series import Buckets, Series, Tail
from gradiometer_server.errors import Conflict
from gradiometer_server.store import chunks, runs
from gradiometer_server.store.charts import ChartReader, Wanted
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.drawing import Chart, Drawn
from gradiometer_server.store.lines import LineRef
from gradiometer_server.store.points import PointReader
from gradiometer_server.store.query import SeriesReader
from gradiometer_server.store.series import SeriesKey, ensure_layout, ensure_series
from gradiometer_server.summaries.selection import display_width

BEGAN_S = 1_800_000_000.5
Point = tuple[int, float]
Range = tuple[float | None, float | None]
numbers = itertools.count(1)
odd = st.sampled_from([math.nan, math.inf, -math.inf])


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("gradiometer_server.store.chunks.chunk_capacity", return_value=16),
        mock.patch("gradiometer_server.summaries.buckets.POINTS_PER_WINDOW", 4),
    ):
        opened = open_database(f"sqlite:///{Path(folder) / 'a.db'}", clock=SystemClock())
        yield opened
        opened.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What is left of some points of an attempt: `first`..`last` is all that is known of their steps."""

    first: int
    last: int
    width: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A line as the reference knows it: all points that are drawn, which of them are still there, and the windows."""

    drawn: dict[int, float]
    raw: dict[int, float]
    windows: tuple[Window, ...]

    def within(self, first: int, last: int) -> list[Window]:
        return [one for one in self.windows if one.last >= first and one.first <= last]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    start_step: int
    loss: tuple[Point, ...]
    x: tuple[Point, ...]
    share: int
    x_share: int
    thinned: tuple[bool, ...]
    x_thinned: tuple[bool, ...]


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    first, stride = draw(st.integers(0, 60)), draw(st.sampled_from([1, 1, 2, 5]))
    stretch = [first + stride * place for place in range(draw(st.sampled_from([1, 8, 40, 80])))]
    late = draw(st.lists(st.integers(0, 150), max_size=6))
    loss = {step: float(draw(st.integers(0, 5))) for step in stretch + late}
    for step in draw(st.lists(st.sampled_from(sorted(loss)), max_size=5)):
        loss[step] = draw(odd | st.sampled_from([1e6, -1e6, 7e7]))
    kind = draw(st.sampled_from(["all", "some", "wild"]))
    x = {step: step * 8.0 for step in loss if kind != "some" or draw(st.booleans())}
    if kind == "wild":
        x = {step: draw(st.floats(-50, 1300) | odd) for step in x}
    thinned = st.sampled_from([(True,), (False,)]) | st.lists(st.booleans(), min_size=1, max_size=9).map(
        tuple
    )
    return Attempt(
        start_step=draw(st.just(0) | st.integers(1, 70)),
        loss=tuple(loss.items()), x=tuple(x.items()), share=draw(st.sampled_from([100, 100, 70])),
        x_share=draw(st.sampled_from([100, 100, 70])), thinned=draw(thinned), x_thinned=draw(thinned),
    )  # fmt: skip


def tail_of(points: Sequence[Point], width: int) -> Tail:
    values_N1 = np.array([v for _, v in points], np.float64).reshape(-1, 1)
    return Tail(
        steps_N=np.array([s for s, _ in points], np.int64), values_NW=np.repeat(values_N1, width, axis=1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One attempt's series: its points in chunks by window where they are thinned, the others as they are."""

    points: dict[int, float]
    windows: tuple[Window, ...]
    gone: frozenset[int]
    tail: Tail


def store(
    database: Database, one: Series, points: Sequence[Point], share: int, pattern: Sequence[bool]
) -> Stored:
    cut = len(points) * share // 100
    if cut:
        plan = chunks.plan_flush(database, one.run_key, [(one, tail_of(points[:cut], one.width))])
        with database.write() as conn:
            chunks.commit_flush(conn, plan, folded={})
    of_series = f"run_id = {one.run_key} AND series_id = {one.series_id}"
    flushed, late = dict(points[:cut]), [step for step, _ in points[cut:]]
    windows: list[Window] = []
    gone: set[int] = set()
    with database.write() as conn:
        rows = conn.exec_driver_sql(
            f"SELECT step0, step1, stride, summary_width FROM chunk WHERE {of_series} ORDER BY step0"
        ).all()
        for row, is_thinned in zip(rows, itertools.cycle(pattern), strict=False):
            # What a tail says of a step that is only left in a window cannot be known to replace something.
            if not is_thinned or any(row.step0 <= step <= row.step1 for step in late):
                continue
            conn.exec_driver_sql(
                f"UPDATE chunk SET data = x'', steps = NULL WHERE {of_series} AND step0 = {row.step0}"
            )
            inside = sorted(step for step in flushed if row.step0 <= step <= row.step1)
            gone.update(inside)
            for place, group in itertools.groupby(
                inside, key=lambda step, row=row: step // row.summary_width
            ):
                steps = list(group)
                end = min((place + 1) * row.summary_width - 1, row.step1)
                last = steps[-1] if row.stride else end
                values = tuple(flushed[step] for step in steps)
                windows.append(Window(first=steps[0], last=last, width=row.summary_width, values=values))
    return Stored(
        points=dict(points),
        windows=tuple(windows),
        gone=frozenset(gone),
        tail=tail_of(points[cut:], one.width),
    )


def truth(stored: Sequence[Stored], begins: Sequence[int | None]) -> Truth:
    """What is drawn of attempts in order of launch; `begins`: where each takes over from the ones before it."""
    drawn: dict[int, float] = {}
    raw: dict[int, float] = {}
    windows: list[Window] = []
    for place, one in enumerate(stored):
        later = [begin for begin in begins[place + 1 :] if begin is not None]
        later += [min(other.points) for other in stored[place + 1 :] if other.points]
        end = min(later, default=2**53) - 1
        for step, value in one.points.items():
            if step <= end:
                drawn[step] = value
                if step not in one.gone:
                    raw[step] = value
        windows += [
            Window(first=w.first, last=min(w.last, end), width=w.width, values=w.values)
            for w in one.windows
            if w.first <= end
        ]
    return Truth(drawn=drawn, raw=raw, windows=tuple(windows))


Kind = Literal["scalar", "layer"]


def make(
    database: Database, given: Sequence[Attempt], name: str, kind: Kind
) -> tuple[int, str, Truth, Truth, dict[int, Tail]]:
    key = "layer/norm" if kind == "layer" else "loss"
    width = 2 if kind == "layer" else 1
    tails: dict[int, Tail] = {}
    losses, xs = [], []
    with database.write() as conn:
        run = runs.ensure_run(
            conn, RunInfo(run_id=f"t{next(numbers)}", project="p", name="n", created_s=1.0), 1.0
        )
        layout_id = ensure_layout(conn, run.run_key, ["a", "b"], [1, 1]).layout_id if width == 2 else None
        keys = [SeriesKey(key=key, kind=kind, width=width, layout_id=layout_id), SeriesKey(key=name)]
        made = []
        for place, one in enumerate(given, 1):
            info = SourceInfo(rank=0, attempt=place, started_s=BEGAN_S, start_step=one.start_step)
            runs.ensure_source(conn, run.run_key, info, 1.0)
            found = ensure_series(conn, run.run_key, place, keys)
            made.append([found[key] for key in keys])
    for one, (loss, x) in zip(given, made, strict=True):
        losses.append(store(database, loss, one.loss, one.share, one.thinned))
        xs.append(store(database, x, one.x, one.x_share, one.x_thinned))
        tails |= {loss.series_id: losses[-1].tail, x.series_id: xs[-1].tail}
    begins = [
        one.start_step + 1 if one.start_step else min(step for step, _ in (*one.loss, *one.x))
        for one in given
    ]
    return run.run_key, key, truth(losses, begins), truth(xs, begins), tails


def counts(values: Sequence[float]) -> tuple[int, int, int, int]:
    return (
        sum(map(math.isfinite, values)),
        sum(map(math.isnan, values)),
        sum(value == math.inf for value in values),
        sum(value == -math.inf for value in values),
    )


def counts_of(found: Buckets, place: int) -> tuple[int, int, int, int]:
    return tuple(
        int(getattr(found, f"num_{what}_BW")[place, 0]) for what in ("finite", "nan", "pos_inf", "neg_inf")
    )  # type: ignore[return-value]


def check_between(found: Buckets, place: int, least: Sequence[float], most: Sequence[float]) -> None:
    """A bucket holds all of `least` and nothing but `most`."""
    for low, count, high in zip(counts(least), counts_of(found, place), counts(most), strict=True):
        assert low <= count <= high
    low, high = found.min_BW[place, 0], found.max_BW[place, 0]
    finite, possible = [v for v in least if math.isfinite(v)], [v for v in most if math.isfinite(v)]
    if finite:
        assert low <= min(finite)
        assert high >= max(finite)
    if not math.isnan(low):
        assert low in possible
        assert high in possible
        assert low - 1e-6 <= found.mean_BW[place, 0] <= high + 1e-6


def check_steps(found: Buckets, line: Truth, first: int, last: int, asked: int, *, fits: bool) -> None:
    width = int(found.width)
    assert len(found.first_step_B) <= asked
    windows = line.within(first, last)
    least: dict[int, list[float]] = {}
    most: dict[int, list[float]] = {}
    for step, value in line.drawn.items():
        if first <= step <= last:
            least.setdefault(step // width, []).append(value)
            if step in line.raw:
                most.setdefault(step // width, []).append(value)
    for window in windows:
        most.setdefault(window.first // width, []).extend(window.values)
    places = [int(step) // width for step in found.first_step_B]
    assert places == sorted(most)
    assert set(least) <= set(most)
    for at, place in enumerate(places):
        check_between(found, at, least.get(place, []), most[place])
    if line.drawn:
        low, high = max(first, min(line.drawn)), min(last, max(line.drawn))
        bound = display_width(low, high, asked) if low <= high else 1
        assert width <= max([bound, *(window.width for window in windows)])
        if fits and not windows and len(line.raw.keys() & set(range(first, last + 1))) <= asked:
            assert width == 1


step_ranges = st.lists(
    st.tuples(st.integers(-1, 260), st.none() | st.integers(0, 160), st.integers(1, 100)),
    min_size=1,
    max_size=6,
)
tries = st.lists(attempts(), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(tries, step_ranges, st.sampled_from(["chart", "query", "layers"]))
def test_on_steps(
    database: Database, given: list[Attempt], ranges: list[tuple[int, int | None, int]], reader: str
) -> None:
    run_key, key, line, _, tails = make(database, given, "_time", "layer" if reader == "layers" else "scalar")
    for first, length, asked in [(0, None, 1), (0, None, 1000), *ranges]:
        last = 10_000 if length is None else first + length
        if reader == "chart":
            ((drawn,),) = ChartReader(database, lambda _: tails).draw(
                [Wanted(refs=(LineRef(run_key=run_key, key=key),))],
                Chart(first=first, last=last, buckets=asked),
            )
            assert drawn.error is None
            found = drawn.buckets
            assert found is not None
            found = Buckets(width=int(drawn.width), **{n: getattr(found, n) for n in ARRAYS})
        elif reader == "query":
            found = SeriesReader(database, lambda _: tails).query(run_key, key, None, first, last, asked)[0]
        else:
            found = SeriesReader(database, lambda _: tails).layers(run_key, "norm", first, last, asked)[1]
            assert np.array_equal(found.max_BW[:, 0], found.max_BW[:, 1], equal_nan=True)
        check_steps(found, line, first, last, asked, fits=True)


ARRAYS = ("first_step_B", "mean_BW", "min_BW", "max_BW", "num_finite_BW", "num_nan_BW", "num_pos_inf_BW", "num_neg_inf_BW")  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(tries, step_ranges)
def test_exact_points_are_refused_only_where_some_were_dropped(
    database: Database, given: list[Attempt], ranges: list[tuple[int, int | None, int]]
) -> None:
    run_key, key, line, _, tails = make(database, given, "_time", "scalar")
    ref = LineRef(run_key=run_key, key=key)
    for low, length, _ in [(0, None, 1), *ranges]:
        first, last = max(low, 0), 10_000 if length is None else max(low, 0) + length
        expected = {step: value for step, value in sorted(line.drawn.items()) if first <= step <= last}
        points = PointReader(database, lambda _, tails=tails: tails)
        if line.within(first, last):
            with pytest.raises(Conflict, match="dropped to save space"):
                points.page(ref, first=first, last=last, begin=0, limit=1000, times=False)
            continue
        assert not expected.keys() - line.raw.keys()
        page = points.page(ref, first=first, last=last, begin=0, limit=1000, times=False)
        assert page.total == len(expected)
        assert dict(zip(page.steps_N.tolist(), map(repr, page.values_N.tolist()), strict=True)) == {
            step: repr(value) for step, value in expected.items()
        }


def x_at(x: dict[int, float], step: int) -> float:
    """X of a step: what was known at it or last before it, or the first of all."""
    before = [known for known in x if known <= step]
    return x[max(before) if before else min(x)]


def covers(found: Buckets, at: int, value: float) -> bool:
    if math.isfinite(value):
        return bool(found.min_BW[at, 0] <= value <= found.max_BW[at, 0])
    return (
        counts_of(found, at)[1 + [math.isnan(value), value == math.inf, value == -math.inf].index(True)] > 0
    )


def check_axis(drawn: Drawn, line: Truth, x_line: Truth, origin: float, ends: Range, asked: int) -> None:
    x = {step: value for step, value in x_line.drawn.items() if math.isfinite(value)}
    found, x_B, width = drawn.buckets, drawn.x_B, drawn.width
    assert found is not None
    assert x_B is not None
    assert len(x_B) <= asked
    low, high = (-math.inf if ends[0] is None else ends[0]), (math.inf if ends[1] is None else ends[1])
    assert all(low <= one <= high for one in x_B)

    def hull(first: int, last: int) -> tuple[float, float]:
        some = [x_at(x, step) - origin for step in range(first, last + 1)]
        return max(low, min(some)), min(high, max(some))

    def is_at(at: int, left: float, right: float) -> bool:
        if width == 0:
            return bool(left <= x_B[at] <= right)
        left, right, place = (math.floor(Fraction(one) / Fraction(width)) for one in (left, right, x_B[at]))
        return bool(left <= place <= right)

    is_exact = not x_line.windows
    least: list[float] = []
    most = list(line.raw.values())
    for step, value in line.drawn.items():
        inside = x_at(x, step) - origin
        if not low <= inside <= high:
            continue
        least.append(value)
        spans = [(step, step)] if step in line.raw else []
        spans += [
            (w.first, w.last) for w in line.windows if w.first <= step <= w.last and step not in line.raw
        ]
        assert any(
            covers(found, at, value) and (not is_exact or any(is_at(at, *hull(*span)) for span in spans))
            for at in range(len(x_B))
        )
    if is_exact:
        most = [value for step, value in line.raw.items() if low <= x_at(x, step) - origin <= high]
    for window in line.windows:
        left, right = hull(window.first, window.last)
        if not is_exact or left <= right:
            most += window.values
    for minimum, have, maximum in zip(
        counts(least), np.sum([counts_of(found, at) for at in range(len(x_B))] or [(0,) * 4], axis=0),
        counts(most), strict=True,
    ):  # fmt: skip
        assert minimum <= have <= maximum


@settings(max_examples=150, deadline=None)
@given(
    tries, st.sampled_from(["metric", "time", "relative_time"]), st.booleans(),
    st.lists(st.tuples(st.floats(-60, 1300), st.none() | st.sampled_from([0.0, 5.0, 40.0, 300.0]), st.integers(4, 60)),
             min_size=1, max_size=6),
)  # fmt: skip
def test_on_other_axes(
    database: Database, given: list[Attempt], kind: Literal["metric", "time", "relative_time"], snaps: bool,
    ranges: list[tuple[float, float | None, int]],
) -> None:  # fmt: skip
    name = "tokens" if kind == "metric" else "_time"
    origin = BEGAN_S if kind == "relative_time" else 0.0
    given = [
        Attempt(
            start_step=one.start_step, loss=one.loss, x=tuple((step, x + origin) for step, x in one.x), share=one.share,
            x_share=one.x_share, thinned=one.thinned, x_thinned=one.x_thinned,
        )
        for one in given
    ]  # fmt: skip
    run_key, key, line, x_line, tails = make(database, given, name, "scalar")
    reader = ChartReader(database, lambda _: tails)
    for first, length, asked in [(None, None, 4), (None, None, 1000), *ranges]:
        # At the border of a window, or anywhere.
        low = None if first is None else float(round(first / 8) * 8) if snaps else first
        high = None if low is None or length is None else low + length
        chart = Chart(
            axis=kind, metric=name if kind == "metric" else None, first=low, last=high, buckets=asked
        )
        ((drawn,),) = reader.draw([Wanted(refs=(LineRef(run_key=run_key, key=key),))], chart)
        if not any(map(math.isfinite, x_line.drawn.values())):
            continue
        assert drawn.error is None, drawn.error
        check_axis(drawn, line, x_line, origin, (low, high), asked)
