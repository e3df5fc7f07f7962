"""The fold on a real database: tails, chunks, episodes and offsets agree after any number of crashes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from gradiometer import wire
from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.alerts import Episode
from gradiometer_server.domain.live import AlertUpdate, LiveUpdate, MetricsUpdate, PointsUpdate, RunUpdate
from gradiometer_server.domain.names import run_key
from gradiometer_server.fold import owner as owner_module
from gradiometer_server.fold.batch import Batch
from gradiometer_server.fold.owner import RunOwner
from gradiometer_server.fold.pipeline import FoldPipeline
from gradiometer_server.store import alerts, log, runs
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.log import LogWriter
from gradiometer_server.store.query import SeriesReader
from gradiometer_server.store.series import list_series
from tests.support.eventually import eventually

STEPS = 40
ATTEMPT = 1_800_000_000_000
STATISTICS = ("norm", "rms", "mean", "std", "abs_max", "zero_fraction", "num_nonfinite")


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    found = open_database(database_url, clock=SystemClock())
    yield found
    found.close()


@pytest.fixture
def log_writer(database: Database) -> Iterator[LogWriter]:
    writer = LogWriter(database)
    writer.start()
    yield writer
    writer.stop(10.0)


class Run:
    """A run of some ranks in a database: puts records into the log and makes batches of them."""

    def __init__(
        self, database: Database, log_writer: LogWriter, run_id: str, *, world_size: int = 2
    ) -> None:
        self.database, self.run_id, self.key = database, run_id, run_key(run_id)
        self._log = log_writer
        info = wire.RunInfo(run_id=run_id, project="tests", name=run_id, created_s=1.8e9)
        with database.write() as conn:
            runs.ensure_run(conn, info, 1.8e9)
            self.sources = [
                runs.ensure_source(
                    conn, self.key, wire.SourceInfo(rank=rank, attempt=ATTEMPT, world_size=world_size), 1.8e9
                ).source_id
                for rank in range(world_size)
            ]

    def put(self, rank: int, first_seq: int, records: Sequence[wire.Record]) -> Batch:
        """Records made durable, as the batch that ingest would hand over."""
        encoded = [(seq, wire.encode(record)) for seq, record in enumerate(records, first_seq)]
        last_seq = first_seq + len(records) - 1
        self._log.submit(self.key, self.sources[rank], first_seq, encoded, last_seq).result(10)
        return Batch(
            run_key=self.key,
            source_id=self.sources[rank],
            first_seq=first_seq,
            last_seq=last_seq,
            entries=tuple(enumerate(records, first_seq)),
            num_bytes=sum(len(data) for _, data in encoded),
        )

    def owner(self, updates: list[LiveUpdate] | None = None) -> RunOwner:
        publish: Callable[[Sequence[LiveUpdate]], None] = (
            (lambda _: None) if updates is None else updates.extend
        )
        return RunOwner(database=self.database, clock=SystemClock(), run_key=self.key, publish=publish)

    def stored(self) -> dict[tuple[str, int | None], tuple[bytes, bytes]]:
        """Every point that is in chunks, as bytes: steps and values by metric and rank."""
        reader = SeriesReader(self.database, lambda _: {})
        with self.database.read() as conn:
            rows = list_series(conn, self.key)
        points = {}
        for row in rows:
            steps_N, values_NW = reader.raw(self.key, row.series.key, row.series.rank)[:2]
            points[row.series.key, row.series.rank] = (steps_N.tobytes(), values_NW.tobytes())
        return points

    def episodes(self) -> list[Episode]:
        with self.database.read() as conn:
            return [row.episode for row in alerts.list_episodes(conn, self.key).episodes]

    def positions(self) -> list[tuple[int, int]]:
        """(acknowledged, folded) of every source."""
        with self.database.read() as conn:
            return [(row.acked_seq, row.folded_seq) for row in runs.list_sources(conn, self.key)]

    def num_frames(self) -> int:
        with self.database.read() as conn:
            return sum(len(log.read_frames(conn, self.key, source, 0, 10**9)) for source in self.sources)


def said_by(rank: int) -> list[wire.Record]:
    """What one rank says: layers, scalars, a loss that becomes NaN for a while, and its end."""
    rng = np.random.default_rng(rank)
    layers = tuple(
        wire.Layer(name=f"w{i}", shape=(8,), numel=8, shard=(rank,), num_shards=2) for i in range(3)
    )
    columns = (wire.Column(name="train/loss"), wire.Column(name="tokens", merge="sum"))
    records: list[wire.Record] = [
        wire.LayerSchema(schema_id=1, layers=layers),
        wire.ScalarSchema(schema_id=2, columns=columns),
        wire.Event(kind="unavailable", time=1.8e9, attributes={"metric": "memory/x", "reason": "no CUDA"}),
    ]
    for step in range(1, STEPS + 1):
        partials = np.abs(rng.normal(size=(3, 7)))
        partials[:, 0], partials[:, 6] = 4, 0
        loss = math.nan if 20 <= step < 23 else float(rng.normal()) + 3
        records += [_frame(1, step, partials.ravel()), _frame(2, step, np.array([loss, 1.0]))]
        if step == 10:
            records.append(
                wire.Event(kind="dropped", time=1.8e9, attributes={"reports": 2, "reason": "full"})
            )
    records.append(wire.Event(kind="exit", time=1.8e9 + STEPS, attributes={"code": 0}))
    return records


def _frame(schema_id: int, step: int, values: np.ndarray) -> wire.Frame:  # type: ignore[type-arg]
    return wire.Frame(
        schema_id=schema_id, steps=(step,), times=(1.8e9 + step,), values=values.astype("<f8").tobytes()
    )


def fold_in_order(run: Run) -> None:
    """The reference: one owner from the first record to the last."""
    owner = run.owner()
    said = [said_by(rank) for rank in range(2)]
    for index in range(len(said[0])):
        for rank in range(2):
            owner.take(run.put(rank, index + 1, [said[rank][index]]))
    owner.flush()


@pytest.mark.parametrize("seed", range(4))
def test_crashes_at_any_point_give_the_same_bytes_and_episodes(
    database: Database, log_writer: LogWriter, seed: int
) -> None:
    reference = Run(database, log_writer, "reference")
    fold_in_order(reference)
    run, chance = Run(database, log_writer, "crashing"), random.Random(seed)
    owner, said, position = run.owner(), [said_by(0), said_by(1)], [0, 0]
    while position != [len(said[0]), len(said[1])]:
        rank = chance.choice([r for r in range(2) if position[r] < len(said[r])])
        records = said[rank][position[rank] : position[rank] + chance.randint(1, 12)]
        batch = run.put(rank, position[rank] + 1, records)
        position[rank] += len(records)
        what = chance.choice(["take", "take", "take", "flush", "crash before the fold", "crash after it"])
        if what != "crash before the fold":
            owner.take(batch)
        if what == "flush":
            owner.flush()
        if what.startswith("crash"):
            owner = run.owner()
    owner.flush()
    assert run.stored() == reference.stored()
    assert run.episodes() == reference.episodes()
    assert [episode.first.rule for episode in run.episodes()] == ["non_finite"]
    assert run.num_frames() == 0
    assert all(acked == folded for acked, folded in run.positions())
    row = _row(run)
    assert (row.state, row.dropped_reports, row.unavailable) == ("finished", 4, {"memory/x": "no CUDA"})
    assert row.rejected_records == 0


def _row(run: Run) -> runs.RunRow:
    with run.database.read() as conn:
        return runs.get_run(conn, run.run_id, 1.8e9)


def test_points_are_published_once_their_series_exist_and_alerts_once_they_are_stored(
    database: Database, log_writer: LogWriter
) -> None:
    run, seen = Run(database, log_writer, "published", world_size=1), []

    def publish(updates: Sequence[LiveUpdate]) -> None:
        with database.read() as conn:
            keys = {row.series.key for row in list_series(conn, run.key)}
        stored = {episode.alert_id for episode in run.episodes()}
        for update in updates:
            if isinstance(update, PointsUpdate):
                assert set(update.series) <= keys
                assert not any(name.startswith("_") for name in update.series)
            if isinstance(update, AlertUpdate):
                assert update.episode.alert_id in stored
            seen.append(update)

    owner = RunOwner(database=database, clock=SystemClock(), run_key=run.key, publish=publish)
    columns = (wire.Column(name="train/loss"),)
    owner.take(run.put(0, 1, [wire.ScalarSchema(schema_id=2, columns=columns)]))
    owner.take(run.put(0, 2, [_frame(2, 1, np.array([1.0])), _frame(2, 2, np.array([math.nan]))]))
    owner.take(run.put(0, 4, [wire.Event(kind="exit", time=1.8e9, attributes={"code": 0})]))
    kinds = [type(update) for update in seen]
    assert kinds[:3] == [MetricsUpdate, PointsUpdate, AlertUpdate]
    assert RunUpdate in kinds
    (points,) = [update for update in seen if isinstance(update, PointsUpdate)]
    assert [step for step, _ in points.series["train/loss"]] == [1, 2]
    assert owner.latest()["train/loss"][0] == 2
    assert owner.flush_is_due(), "the run has ended"


def test_a_batch_that_never_arrived_is_read_from_the_log(database: Database, log_writer: LogWriter) -> None:
    run = Run(database, log_writer, "gap", world_size=1)
    owner, said = run.owner(), said_by(0)
    batches = [run.put(0, 1 + start, said[start : start + 10]) for start in range(0, len(said), 10)]
    owner.take(batches[0])
    owner.take(batches[4])
    for batch in (batches[2], *batches[5:]):
        owner.take(batch)
    owner.flush()
    steps_N, values_NW = SeriesReader(database, lambda _: {}).raw(run.key, "tokens")[:2]
    assert steps_N.tolist() == list(range(1, STEPS + 1))
    assert values_NW.ravel().tolist() == [1.0] * STEPS


def test_refused_records_at_the_end_do_not_keep_a_source_unfolded(
    database: Database, log_writer: LogWriter
) -> None:
    run = Run(database, log_writer, "refused", world_size=1)
    batch = run.put(0, 1, said_by(0)[:5])
    log_writer.submit(run.key, run.sources[0], 6, [], 8).result(10)
    owner = run.owner()
    owner.take(batch)
    owner.flush()
    assert run.positions() == [(8, 8)]


def test_a_value_beyond_float32_is_kept(database: Database, log_writer: LogWriter) -> None:
    run = Run(database, log_writer, "large", world_size=1)
    layers = tuple(wire.Layer(name=f"w{i}", shape=(4,), numel=4) for i in range(2))
    huge = np.array([[4, 1e300, 1e308, -1e300, 1e300, 0, 0], [0, 9, 9, 9, 9, 9, 9]], dtype=np.float64)
    small = np.array([[4, 1, 1, 0, 1, 0, 0], [4, 1, 1, 0, 1, 0, 0]], dtype=np.float64)
    owner = run.owner()
    owner.take(run.put(0, 1, [wire.LayerSchema(schema_id=1, layers=layers)]))
    owner.take(
        run.put(0, 2, [_frame(1, 1, small.ravel()), _frame(1, 2, huge.ravel()), _frame(1, 3, small.ravel())])
    )
    tails = owner.tails()
    owner.flush()
    values = {row.series.key: row.series.series_id for row in _series(run)}
    abs_max = np.asarray(tails[values["layer/abs_max"]].values_NW)
    assert abs_max[:, 0].tolist() == [1.0, 1e300, 1.0]
    assert owner.tails() == {}


def _series(run: Run) -> list:  # type: ignore[type-arg]
    with run.database.read() as conn:
        return list_series(conn, run.key)


def test_the_pipeline_folds_flushes_and_starts_again(database: Database, log_writer: LogWriter) -> None:
    many = [Run(database, log_writer, f"run-{number}", world_size=1) for number in range(5)]
    pipeline = FoldPipeline(database, clock=SystemClock(), publish=lambda _: None)
    pipeline.start()
    said = said_by(0)[:-1]
    for run in many:
        for start in range(0, len(said), 20):
            pipeline.submit(run.put(0, start + 1, said[start : start + 20]))
    for run in many:
        eventually(lambda run=run: pipeline.latest(run.key).get("tokens", (0,))[0] == STEPS, what=run.run_id)
        # Seven layer statistics, loss, tokens, time, and of the gradient's half that was told: how much it is, and its
        # non-finite elements.
        assert len(pipeline.tails(run.key)) == 12
        assert pipeline.has_room(run.key)
    pipeline.stop(30.0)
    assert all(run.num_frames() == 0 for run in many)

    late = many[0].put(0, len(said) + 1, [_frame(2, STEPS + 1, np.array([1.0, 5.0]))])
    again = FoldPipeline(database, clock=SystemClock(), publish=lambda _: None)
    again.start()
    try:
        assert again.latest(many[0].key) == {"train/loss": (STEPS + 1, 1.0), "tokens": (STEPS + 1, 5.0)}
        again.submit(late)
        reader = SeriesReader(database, again.tails)
        steps_N = reader.raw(many[0].key, "tokens")[0]
        assert steps_N.tolist() == list(range(1, STEPS + 2))
    finally:
        again.stop(30.0)


def test_a_fold_that_is_behind_says_so(database: Database, log_writer: LogWriter) -> None:
    run = Run(database, log_writer, "behind", world_size=1)
    pipeline = FoldPipeline(
        database, clock=SystemClock(), publish=lambda _: None, num_workers=1, queue_bytes=10_000
    )
    said = said_by(0)
    for start in range(0, len(said), 10):
        pipeline.submit(run.put(0, start + 1, said[start : start + 10]))
    assert not pipeline.has_room(run.key), "no thread folds yet"
    pipeline.start()
    try:
        eventually(lambda: pipeline.has_room(run.key), what="the queue is folded")
        eventually(lambda: run.num_frames() == 0, what="a run that has ended is flushed at once")
    finally:
        pipeline.stop(30.0)


def test_a_failing_publish_costs_no_data(database: Database, log_writer: LogWriter) -> None:
    run, failures = Run(database, log_writer, "failing", world_size=1), iter([True, False, True])

    def publish(_: Sequence[LiveUpdate]) -> None:
        if next(failures, False):
            raise RuntimeError("the live feed broke")

    pipeline = FoldPipeline(database, clock=SystemClock(), publish=publish)
    pipeline.start()
    try:
        said = said_by(0)
        for start in range(0, len(said), 7):
            pipeline.submit(run.put(0, start + 1, said[start : start + 7]))
        eventually(lambda: run.num_frames() == 0, 20.0, what="everything is folded after all")
    finally:
        pipeline.stop(30.0)
    assert SeriesReader(database, lambda _: {}).raw(run.key, "tokens")[0].tolist() == list(
        range(1, STEPS + 1)
    )


def test_a_record_that_cannot_be_folded_is_counted_and_passed_over(
    database: Database, log_writer: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(database, log_writer, "poison", world_size=1)
    columns = (wire.Column(name="a"), wire.Column(name="b"))
    owner = run.owner()
    # Ingest would refuse the frame of one value; an older server's log may hold one.
    poison = _frame(2, 2, np.array([1.0]))
    owner.take(
        run.put(
            0,
            1,
            [
                wire.ScalarSchema(schema_id=2, columns=columns),
                _frame(2, 1, np.array([1.0, 2.0])),
                poison,
                _frame(2, 3, np.array([1.0, 2.0])),
            ],
        )
    )
    owner.flush()
    assert SeriesReader(database, lambda _: {}).raw(run.key, "a")[0].tolist() == [1, 3]
    assert _row(run).rejected_records == 1
    assert "record 3 could not be folded" in caplog.text


def test_limits_are_what_the_design_says() -> None:
    assert (owner_module.FLUSH_STEPS, owner_module.FLUSH_BYTES, owner_module.FLUSH_IDLE_S) == (
        256,
        2**20,
        10.0,
    )
