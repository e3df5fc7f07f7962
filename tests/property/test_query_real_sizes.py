"""No spike and no NaN is hidden with chunks and windows of their real sizes, on both engines, flushed or not.

`test_query_never_hides.py` looks at small chunks from every side; here a line is long enough for many chunks of 4,096
points and windows of 64, and holds what is hard to see: single spikes of every size and kind, also next to each other.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.series import Series, Tail
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.maintenance import check
from gradiometer_server.store.query import SeriesReader
from gradiometer_server.store.series import SeriesKey
from tests.integration.stores import flush, new_run, new_series, tail

NUM_STEPS = 30_000
KINDS = (math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320, -5e-324, 1.0000001, -7.5, -0.0)


class Line:
    """A constant line with one special value in a hundred, stored in pieces; its last thousand points are not flushed."""

    def __init__(self, database: Database, *, stride: int) -> None:
        chance = random.Random(stride)
        self.steps = stride * np.arange(NUM_STEPS, dtype=np.int64)
        self.values = np.ones(NUM_STEPS)
        for place in chance.sample(range(NUM_STEPS), NUM_STEPS // 100):
            self.values[place] = chance.choice(KINDS)
        key = new_run(database, f"line-{stride}")
        (self.series,) = new_series(database, key, 1, SeriesKey(key="train/loss"))
        edges = [0, *sorted(chance.sample(range(NUM_STEPS - 1000), 20)), NUM_STEPS - 1000]
        for begin, end in itertools.pairwise(edges):
            flush(database, key, (self.series, tail(self.steps[begin:end], self.values[begin:end])))
        left = Tail(steps_N=self.steps[-1000:], values_NW=self.values[-1000:, None])
        self.reader = SeriesReader(database, lambda _: {self.series.series_id: left})

    def check(self, first: int, last: int, asked: int) -> None:
        """Ask, and compare with numpy bucket by bucket."""
        one: Series = self.series
        found = self.reader.query(one.run_key, one.key, None, first, last, asked)[0]
        begin, end = np.searchsorted(self.steps, [first, last + 1])
        steps, values = self.steps[begin:end], self.values[begin:end]
        assert len(found.first_step_B) <= asked
        buckets, starts = np.unique(steps // found.width, return_index=True)
        assert (found.first_step_B // found.width == buckets).all()
        parts = np.split(values, starts[1:]) if len(values) else []
        for place, part in enumerate(parts):
            finite = part[np.isfinite(part)]
            assert found.num_nan_BW[place, 0] == np.isnan(part).sum()
            assert found.num_pos_inf_BW[place, 0] == (part == math.inf).sum()
            assert found.num_neg_inf_BW[place, 0] == (part == -math.inf).sum()
            assert found.num_finite_BW[place, 0] == len(finite)
            if len(finite):
                assert found.min_BW[place, 0] == finite.min()
                assert found.max_BW[place, 0] == finite.max()


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('real-sizes') / 'a.db'}"
    else:
        url = request.getfixturevalue("postgres_cluster").create_database()
    opened = open_database(url, clock=SystemClock())
    yield opened
    opened.close()


@pytest.fixture(scope="module", params=[1, 7])
def line(database: Database, request: pytest.FixtureRequest) -> Line:
    return Line(database, stride=request.param)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    st.integers(1, 3000) | st.sampled_from([1, 2, 3, 64, 100_000]),
)
def test_every_special_value_is_in_its_bucket(line: Line, part: list[float], asked: int) -> None:
    last = int(line.steps[-1])
    line.check(int(part[0] * last), int(part[1] * last), asked)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, NUM_STEPS - 1), st.integers(0, 500), st.integers(0, 500), st.integers(1, 50))
def test_so_it_is_in_a_close_view(line: Line, place: int, before: int, after: int, asked: int) -> None:
    step = int(line.steps[place])
    line.check(max(0, step - before), step + after, asked)


def test_the_database_passes_the_check(database: Database) -> None:
    assert list(check(database)) == []
