"""Many folding and reading threads at once never corrupt a chunk.

zstandard's (de)compressors are not thread-safe and let go of the GIL: with one pair for all threads both tests of round
trips here fail within a second (see `test_a_shared_compressor_would_not_do`, which makes sure that they can).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gradiometer import wire
from gradiometer_server.clock import SystemClock
from gradiometer_server.fold.pipeline import FoldPipeline
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.log import LogWriter
from gradiometer_server.store.maintenance import check
from gradiometer_server.store.query import SeriesReader
from gradiometer_server.summaries import codec
from tests.support.eventually import eventually
from tests.support.fold_store import FoldedRun, HandClock, Writer
from tests.support.paths import PYTHONPATH, ROOT

ROUND_TRIPS = 60
NUM_RUNS = 6
NUM_STEPS = 800
NUM_FOLDERS = 4
NUM_READERS = 4
NUM_LAYERS = 40
BATCH = 100


def in_threads(number: int, work: Callable[[int], None]) -> None:
    """Run `work(0)`, `work(1)`, ... at the same time; raises what one of them raised."""
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(work, range(number)))


def round_trips(place: int) -> None:
    rng = np.random.default_rng(place)
    for _ in range(ROUND_TRIPS):
        values = rng.normal(size=(4096, 8)).cumsum(axis=0)
        packed = codec.encode_values(values)
        assert codec.decode_values(packed, 4096, 8).tobytes() == values.tobytes()
        told = values.tobytes()[: 1000 * (place + 1)]
        assert codec.unpack_bytes(codec.pack_bytes(told)) == told


def test_every_thread_gets_back_what_it_packed() -> None:
    in_threads(8, round_trips)


SHARED = """
import sys, types
from gradiometer_server.summaries import codec
import zstandard
codec._zstd = types.SimpleNamespace(
    compressor=zstandard.ZstdCompressor(level=1, write_checksum=True), decompressor=zstandard.ZstdDecompressor()
)
from tests.faults.test_many_threads import in_threads, round_trips
in_threads(8, round_trips)
"""


def test_a_shared_compressor_would_not_do() -> None:
    """In a process of its own, because it may end with a segmentation fault."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    for _ in range(10):
        done = subprocess.run(
            [sys.executable, "-c", SHARED], cwd=ROOT, env=environment, capture_output=True, check=False
        )
        if done.returncode != 0:
            return
    pytest.fail("the round trips do not notice a compressor that all threads share")


def writer_of(number: int) -> Writer:
    """A run of scalars and layers that are known from their step alone."""
    layers = tuple(wire.Layer(f"w{i}", (4,), 4) for i in range(NUM_LAYERS))
    records: list[wire.Record] = [
        wire.ScalarSchema(schema_id=1, columns=(wire.Column("train/loss"), wire.Column("lr"))),
        wire.LayerSchema(schema_id=2, layers=layers),
    ]
    for step in range(NUM_STEPS):
        row = np.array([loss(number, step), 1.0 / (step + 1)], "<f8")
        records.append(wire.Frame(schema_id=1, steps=(step,), times=(1.8e9 + step,), values=row.tobytes()))
        partials = np.tile(np.array([4.0, 1.0, square(number, step), 0.0, 1.0, 0.0, 0.0]), (NUM_LAYERS, 1))
        records.append(
            wire.Frame(
                schema_id=2, steps=(step,), times=(1.8e9 + step,), values=partials.astype("<f8").tobytes()
            )
        )
    records.append(wire.Event(kind="exit", time=1.9e9, attributes={"code": 0}))
    return Writer(attempt=1, rank=0, world_size=1, records=tuple(records))


def loss(number: int, step: int) -> float:
    return number + 0.1 * step


def square(number: int, step: int) -> float:
    return float((number + step) ** 2)


class Crowd:
    """Folders and readers of the same runs."""

    def __init__(self, database: Database, log_writer: LogWriter) -> None:
        self.database = database
        self.pipeline = FoldPipeline(
            database, clock=SystemClock(), publish=lambda _: None, num_workers=NUM_FOLDERS
        )
        self.reader = SeriesReader(database, self.pipeline.tails)
        self.runs = [FoldedRun(database, log_writer, f"run-{n}", HandClock()) for n in range(NUM_RUNS)]
        self.num_reads = [0] * NUM_READERS
        self._over = threading.Event()

    def work(self, place: int) -> None:
        """The first one writes, all others read until it is done."""
        if place:
            self._read(place - 1)
            return
        try:
            self._write()
        finally:
            self._over.set()

    def _write(self) -> None:
        writers = [writer_of(number) for number in range(NUM_RUNS)]
        for first in range(0, len(writers[0].records), BATCH):
            for one, writer in zip(self.runs, writers, strict=True):
                end = min(first + BATCH, len(writer.records))
                self.pipeline.submit(one.put(writer, first, end))
        for one in self.runs:
            eventually(lambda one=one: one.left_in_log() == 0, 60, what="everything is folded")  # type: ignore[misc]

    def _read(self, place: int) -> None:
        chance = random.Random(place)
        while not self._over.is_set():
            number = chance.randrange(NUM_RUNS)
            self.num_reads[place] += compare(self.reader, self.runs[number].key, number, chance)


def test_folders_and_readers_at_once_leave_every_value_right(database_url: str) -> None:
    database = open_database(database_url, clock=SystemClock())
    log_writer = LogWriter(database)
    log_writer.start()
    crowd = Crowd(database, log_writer)
    crowd.pipeline.start()
    try:
        in_threads(1 + NUM_READERS, crowd.work)
    finally:
        crowd.pipeline.stop(30.0)
        log_writer.stop(10.0)
    assert min(crowd.num_reads) > 10
    for number, one in enumerate(crowd.runs):
        assert crowd.reader.raw(one.key, "train/loss", None)[0].tolist() == list(range(NUM_STEPS))
        assert compare(crowd.reader, one.key, number, random.Random(0))
    assert list(check(database)) == []
    database.close()


def compare(reader: SeriesReader, key: int, number: int, chance: random.Random) -> bool:
    """Read a range of a run in two ways; whether there was anything, and every value of it was right."""
    if not reader.metrics(key):
        return False
    first = chance.randrange(NUM_STEPS)
    last = first + chance.randrange(NUM_STEPS)
    steps, values = reader.raw(key, "train/loss", None, first, last)[:2]
    assert values[:, 0].tolist() == [loss(number, step) for step in steps.tolist()]
    if any(row.name == "layer/norm" for row in reader.metrics(key)):
        steps, norms = reader.raw(key, "layer/norm", None, first, last)[:2]
        assert (norms == np.abs(number + steps)[:, None]).all()
    found = reader.query(key, "train/loss", None, first, last, chance.randint(1, 50))[0]
    assert (np.diff(found.max_BW[:, 0]) > 0).all()
    return bool(len(steps))
