"""What is left of a run whose raw points were dropped: every extreme, every NaN, and honest answers, on both engines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from sqlalchemy import select, update

from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.series import Buckets, Series
from gradiometer_server.errors import Conflict, NotFound
from gradiometer_server.store import maintenance, space, thinning
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.lines import LineRef
from gradiometer_server.store.points import PointReader
from gradiometer_server.store.query import SeriesReader
from gradiometer_server.store.series import SeriesKey, ensure_layout
from gradiometer_server.store.tables import chunk, run, series
from tests.integration.stores import LOSS, flush, new_run, new_series, tail

LATER_S = 10.0 * 86_400
STEPS = 10_000


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    made = open_database(database_url, clock=SystemClock())
    yield made
    made.close()


def end(database: Database, key: int) -> None:
    with database.write() as conn:
        conn.execute(update(run).where(run.c.run_id == key).values(outcome="finished"))


def fill(database: Database) -> tuple[int, Series, np.ndarray]:
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    values = np.random.default_rng(1).standard_normal(STEPS)
    values[[17, 4321, 9999]] = [np.nan, 1e300, -np.inf]
    flush(database, key, (one, tail(np.arange(1, STEPS + 1), values)))
    end(database, key)
    return key, one, values


def thin(database: Database, key: int) -> int:
    total, place = 0, (-1, -1)
    while True:
        after, freed = thinning.thin_batch(database, key, place, LATER_S)
        total += freed
        if after is None:
            return total
        place = after


def query(
    database: Database, key: int, first: int | None = None, last: int | None = None, buckets: int = 100
) -> Buckets:
    reader = SeriesReader(database, lambda _key: {})
    return reader.query(key, LOSS.key, None, first, last, buckets)[0]


def test_coarse_answers_stay_the_same_to_the_last_bit(database: Database) -> None:
    key, _, _ = fill(database)
    before = query(database, key)
    assert thin(database, key) > 50_000
    after = query(database, key)
    assert before.width == after.width == 128
    for name in (
        "first_step_B",
        "min_BW",
        "max_BW",
        "num_finite_BW",
        "num_nan_BW",
        "num_pos_inf_BW",
        "num_neg_inf_BW",
    ):
        assert np.array_equal(getattr(before, name), getattr(after, name), equal_nan=True), name
    assert np.allclose(before.mean_BW, after.mean_BW, rtol=1e-12, equal_nan=True)
    assert thin(database, key) == 0
    assert list(maintenance.check(database)) == []


def test_fine_answers_say_how_wide_they_are_and_hide_nothing(database: Database) -> None:
    key, _, _ = fill(database)
    thin(database, key)
    near = query(database, key, 4300, 4340, 1000)
    assert near.width == 64
    assert near.max_BW.max() == 1e300
    assert near.first_step_B[0] <= 4300
    assert near.first_step_B[-1] + near.width > 4340
    everything = query(database, key, buckets=100_000)
    assert everything.width == 64
    assert everything.num_finite_BW.sum() == STEPS - 2
    assert (everything.num_nan_BW.sum(), everything.num_neg_inf_BW.sum()) == (1, 1)


def test_exact_points_are_refused_with_the_reason(database: Database) -> None:
    key, _, _ = fill(database)
    thin(database, key)
    with pytest.raises(Conflict, match="dropped to save space") as caught:
        SeriesReader(database, lambda _key: {}).raw(key, LOSS.key)
    assert caught.value.code == "points_dropped"


def test_a_run_that_is_not_over_is_left_alone(database: Database) -> None:
    key, _, _ = fill(database)
    with database.write() as conn:
        conn.execute(update(run).values(heartbeat_s=LATER_S - 10))
    assert thin(database, key) == 0
    with database.write() as conn:
        conn.execute(update(run).values(heartbeat_s=LATER_S - 3600, outcome="open"))
    assert thin(database, key) == 0
    assert len(query(database, key, 1, 50, 1000).first_step_B) == 50
    with database.write() as conn:
        conn.execute(update(run).values(heartbeat_s=LATER_S - 90_000))
    # Nobody has listened for longer than an hour: its agents may be training all the same.
    assert thinning.thin_batch(database, key, (-1, -1), LATER_S, LATER_S - 3600) == (None, 0)
    assert thinning.drop_details_batch(database, key, LATER_S, LATER_S - 3600) is None
    assert thin(database, key) > 0


def test_points_that_come_after_all_are_kept_beside_or_counted(database: Database) -> None:
    key, one, _values = fill(database)
    thin(database, key)
    with database.read() as conn:
        begins = conn.execute(select(chunk.c.step0, chunk.c.step1).order_by(chunk.c.step0)).all()
    assert len(begins) == 3
    late = np.array([0, 5, 4321, STEPS, STEPS + 1, STEPS + 900])
    flush(database, key, (one, tail(late, [7.0] * 6)))
    flush(database, key, (one, tail([STEPS + 5], [8.0])))
    with database.read() as conn:
        row = conn.execute(select(series)).one()
        kept = conn.execute(select(run)).one()
    assert (row.num_points, row.first_step, row.last_step) == (STEPS + 4, 0, STEPS + 900)
    assert kept.rejected_records == 3
    assert "retention" in kept.last_rejection
    found = query(database, key, buckets=100_000)
    assert int(found.num_finite_BW.sum()) == STEPS - 2 + 4
    assert found.max_BW.max() == 1e300
    assert list(maintenance.check(database)) == []


def test_a_run_that_comes_back_and_is_old_again_is_thinned_again(database: Database) -> None:
    key, one, _ = fill(database)
    first, _ = thinning.thin_batch(database, key, (-1, -1), LATER_S)
    assert first is not None
    assert not next(space.list_space(database, with_bytes=False)).is_thinned, "a stop has cut it short"
    thin(database, key)
    found = next(space.list_space(database, with_bytes=True))
    assert (found.is_thinned, found.raw_bytes) == (True, 0)
    with database.write() as conn:
        conn.execute(update(run).values(updated_s=2 * LATER_S))
    flush(database, key, (one, tail(np.arange(20_000, 30_000), np.ones(10_000))))
    assert not next(space.list_space(database, with_bytes=False)).is_thinned
    assert thin(database, key) > 0


def test_layers_of_a_thinned_run(database: Database) -> None:
    key = new_run(database)
    with database.write() as conn:
        layout = ensure_layout(conn, key, ["a", "b"], [1, 1])
    norm = SeriesKey(key="layer/norm", kind="layer", width=2, layout_id=layout.layout_id)
    (one,) = new_series(database, key, 1, norm)
    values = np.ones((3000, 2))
    values[1234] = [np.nan, 99.0]
    flush(database, key, (one, tail(np.arange(3000), values)))
    end(database, key)
    reader = SeriesReader(database, lambda _key: {})
    before = reader.layers(key, "norm", columns=40)[1]
    thin(database, key)
    after = reader.layers(key, "norm", columns=40)[1]
    assert np.array_equal(before.max_BW, after.max_BW)
    assert np.array_equal(before.num_nan_BW, after.num_nan_BW)
    with pytest.raises(NotFound):
        reader.layer_statistics_at(key)


def test_where_a_later_attempt_took_over_nothing_of_the_one_before_comes_back(database: Database) -> None:
    key = new_run(database, attempts=((1000, 0), (2000, 10)))
    (first,), (second,) = (new_series(database, key, place, LOSS) for place in (1, 2))
    steps = np.arange(1, 4001)
    flush(database, key, (first, tail(steps, np.full(4000, 100.0))))
    values = np.ones(3990)
    values[777 - 11] = 7e7
    flush(database, key, (second, tail(steps[10:], values)))
    end(database, key)
    thin(database, key)
    flush(database, key, (second, tail(np.arange(4001, 9001), np.ones(5000))))

    whole = query(database, key, 64, 4000, buckets=100_000)
    assert int(whole.num_finite_BW.sum()) == 4000 - 64 + 1
    assert (whole.min_BW.max(), whole.max_BW[whole.max_BW < 7e7].max()) == (1.0, 1.0)
    # The window in which the second took over is drawn as a whole, with that of the second beside it.
    begin = query(database, key, 1, 63)
    assert int(begin.num_finite_BW.sum()) == 63 + 53
    near = query(database, key, 770, 780, 10)
    assert (len(near.first_step_B), near.width, near.max_BW.max()) == (1, 64, 7e7)
    reader = SeriesReader(database, lambda _key: {})
    found, _ = reader.raw(key, LOSS.key, None, 4001, None)
    assert len(found) == 5000
    with pytest.raises(Conflict, match="dropped to save space"):
        reader.raw(key, LOSS.key, None, 4000, None)
    page = PointReader(database, lambda _key: {}).page(
        LineRef(run_key=key, key=LOSS.key), first=4001, last=9000, begin=0, limit=10
    )
    assert (page.total, page.more, len(page.steps_N)) == (5000, True, 10)
