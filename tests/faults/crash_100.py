"""`kill -9` of the real server at random moments while it ingests and folds, as often as you say.

    python -m tests.faults.crash_100 --engine sqlite --times 100
    python -m tests.faults.crash_100 --engine postgresql --times 100 --seed 7

Four sources stream without a pause over real connections, two of them ranks of one run, one of them with so many values
that its run is flushed several times a second. Every record is known from its number alone. After the last kill every
acknowledged record must be there, once, bit for bit; in between, and at the end, the check behind `gradiometer db check`
must find nothing. Takes about four seconds a kill. The normal test suite does a few (`test_server_killed.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import text
from websockets.exceptions import WebSocketException

from gradiometer import wire
from gradiometer_server.domain.names import run_key
from gradiometer_server.store import maintenance, runs
from gradiometer_server.store.database import Database
from gradiometer_server.store.query import SeriesReader
from tests.support.eventually import eventually
from tests.support.postgres import PostgresCluster
from tests.support.server import Server
from tests.support.wire_client import WireClient

NUM_LAYERS = 8
ODD = (-0.0, 5e-324, 1e-320, 2.0**-149, 1e308, -1.7976931348623157e308, 0.1)
"""Values that a careless path changes. All finite: what is not opens alerts, and those are another test's."""
MOST_RECORDS = 40
FLOW_S = 60.0


@dataclasses.dataclass(frozen=True)
class Source:
    """One rank, how many steps one of its frames holds, and how many metrics it has beside the two of all."""

    run_id: str
    rank: int = 0
    world_size: int = 1
    frame_steps: int = 1
    num_more: int = 0

    def record(self, seq: int) -> bytes:
        """Record `seq`: two schemas, then in turns scalars, layers of their last step, and a count of dropped reports."""
        if seq <= 2:
            return wire.encode(self._schema(seq))
        block, kind = divmod(seq - 3, 3)
        first = block * self.frame_steps
        steps = tuple(range(first, first + self.frame_steps))
        if kind == 2:
            told = wire.Event(kind="dropped", time=1.8e9 + first, attributes={"reports": 1, "reason": "test"})
            return wire.encode(told)
        if kind == 1:
            layer = (4.0, 1.0, float(first + 1), 0.0, 1.0, 0.0, 0.0)
            return self._frame(2, steps[-1:], layer * NUM_LAYERS)
        return self._frame(1, steps, np.column_stack([self.values(name, steps) for name in self.names]))

    def _schema(self, seq: int) -> wire.ScalarSchema | wire.LayerSchema:
        if seq == 1:
            columns = tuple(wire.Column(name, "max" if name == "odd" else "mean") for name in self.names)
            return wire.ScalarSchema(schema_id=1, columns=columns)
        shard = (self.rank,) if self.world_size > 1 else ()
        return wire.LayerSchema(
            schema_id=2,
            layers=tuple(
                wire.Layer(f"w{i}", (4 * self.world_size,), 4 * self.world_size, shard, self.world_size)
                for i in range(NUM_LAYERS)
            ),
        )

    def _frame(self, schema_id: int, steps: tuple[int, ...], values: object) -> bytes:
        times = tuple(1.8e9 + step for step in steps)
        data = np.asarray(values, "<f8").tobytes()
        return wire.encode(wire.Frame(schema_id=schema_id, steps=steps, times=times, values=data))

    @property
    def names(self) -> tuple[str, ...]:
        return ("train/loss", "odd", *(f"more/{number}" for number in range(self.num_more)))

    def values(self, name: str, steps: Sequence[int]) -> NDArray[np.float64]:
        """What this rank says of a metric in these steps."""
        if name == "odd":
            return np.array([ODD[step % len(ODD)] for step in steps])
        return 0.5 * np.array(steps, np.float64) + self.rank + self.names.index(name)

    def num_blocks(self, seq: int, kind: int) -> int:
        """How many records of a kind there are up to record `seq`."""
        return max(0, (seq - 3 - kind) // 3 + 1)


SOURCES = (
    Source("two", rank=0, world_size=2),
    Source("two", rank=1, world_size=2),
    Source("one"),
    Source("wide", frame_steps=64, num_more=40),
)


class Sender(threading.Thread):
    """Streams as an agent does: from the last ack, over any number of connections, until told to end."""

    def __init__(self, url: str, source: Source, seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self.source, self._chance = url, source, random.Random(seed)
        self.acked, self.ending = 0, threading.Event()
        self.problems: list[str] = []

    def run(self) -> None:
        while not self.ending.is_set():
            try:
                with self._client() as client:
                    self._stream(client)
            except (OSError, WebSocketException, TimeoutError):
                time.sleep(0.01)
            except AssertionError as error:
                self.problems.append(str(error))
                return

    def _client(self) -> WireClient:
        source = self.source
        return WireClient(self._url, source.run_id, rank=source.rank, world_size=source.world_size)

    def _stream(self, client: WireClient) -> None:
        welcome = client.hello()
        if not isinstance(welcome, wire.Welcome):
            return  # the server is stopping, or its store is not there yet
        if client.next_seq <= self.acked:
            self.problems.append(f"{self.source}: welcomed at {client.next_seq}, acknowledged {self.acked}")
        while not self.ending.is_set():
            first = client.next_seq
            count = self._chance.randint(1, MOST_RECORDS)
            client.post(*(self.source.record(seq) for seq in range(first, first + count)))
            while self.acked < first + count - 1:
                answer = client.receive()
                if not isinstance(answer, wire.Ack):
                    return
                self.acked = max(self.acked, answer.seq)
                if answer.rejected:
                    self.problems.append(f"{self.source}: refused {answer.rejected}")


def hammer(server: Server, *, times: int, seed: int) -> str:
    """Kill and start `server` so often; raises AssertionError if anything is lost, double or damaged.

    After some of the kills the database is looked at before the server starts again. Not after all: it is the server
    that must recover it, and a look reads everything.
    """
    chance, begun_s = random.Random(seed), time.monotonic()
    senders = [Sender(server.url, source, seed + place) for place, source in enumerate(SOURCES)]
    for sender in senders:
        sender.start()
    for number in range(1, times + 1):
        _wait_for_acks(senders)
        # A random moment is the point here, not a condition. Small runs are flushed every two seconds.
        time.sleep(chance.uniform(0, chance.choice([0.5, 0.5, 3.0])))
        server.kill()
        if chance.random() < max(0.1, 2 / times):
            _look(server.database_url, senders)
        server.start()
        print(
            f"kill {number} of {times}: {[sender.acked for sender in senders]} records acknowledged",
            flush=True,
        )
    _wait_for_acks(senders)
    for sender in senders:
        sender.ending.set()
    for sender in senders:
        sender.join(FLOW_S)
        assert not sender.is_alive(), f"{sender.source} goes on"
    code = server.stop()
    assert code == 0, f"the server ended with {code}"
    assert [problem for sender in senders for problem in sender.problems] == []
    num_points = _verify(server.database_url, senders)
    num_records = sum(sender.acked for sender in senders)
    took_s = time.monotonic() - begun_s
    return (
        f"{times} kills in {took_s:.0f} s: {num_records} records acknowledged, {num_points} points compared"
    )


def _wait_for_acks(senders: list[Sender]) -> None:
    before = [sender.acked for sender in senders]

    def flow() -> bool:
        assert not any(sender.problems for sender in senders), [sender.problems for sender in senders]
        return all(sender.acked > acked for sender, acked in zip(senders, before, strict=True))

    eventually(flow, FLOW_S, what="records of every source are acknowledged")


@contextmanager
def _opened(url: str) -> Iterator[Database]:
    with closing(Database(url)) as database:
        if not database.is_sqlite:
            eventually(lambda: _is_alone(database), FLOW_S, what="what the killed server began is over")
        yield database


def _is_alone(database: Database) -> bool:
    others = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with database.read() as conn:
        return conn.execute(text(others)).scalar_one() == 0


def _look(url: str, senders: list[Sender]) -> None:
    """What was acknowledged is in the log or folded, and nothing is damaged."""
    with _opened(url) as database:
        assert [f"{one.where}: {one.what}" for one in maintenance.check(database)] == []
        for sender in senders:
            row = _row(database, sender.source)
            assert row.acked_seq >= sender.acked, f"{sender.source}: {row.acked_seq} of {sender.acked}"


def _row(database: Database, source: Source) -> runs.SourceRow:
    with database.read() as conn:
        rows = runs.list_sources(conn, run_key(source.run_id))
    return next(row for row in rows if row.rank == source.rank)


def _verify(url: str, senders: list[Sender]) -> int:
    """Compare everything that is stored with what was sent; returns the number of points."""
    _look(url, senders)
    num_points = 0
    with _opened(url) as database:
        reader = SeriesReader(database, lambda _: {})
        for run_id in dict.fromkeys(source.run_id for source in SOURCES):
            num_points += _verify_run(database, reader, run_id)
    return num_points


def _verify_run(database: Database, reader: SeriesReader, run_id: str) -> int:
    sources = [source for source in SOURCES if source.run_id == run_id]
    reached = {source: _row(database, source).acked_seq for source in sources}
    key, num_points = run_key(run_id), 0
    blocks = {source: source.num_blocks(seq, 0) for source, seq in reached.items()}
    num_steps = {source: blocks[source] * source.frame_steps for source in sources}
    # Steps of which only one rank was heard are stored as well, behind those of both.
    steps = range(min(num_steps.values()))
    for name in sources[0].names:
        each = [source.values(name, steps) for source in sources]
        num_points += _same(reader, key, name, None, each[0] if name == "odd" else np.mean(each, axis=0))
        for source, values in zip(sources, each, strict=True) if len(sources) > 1 else []:
            num_points += _same(reader, key, name, source.rank, values)
    layer_blocks = min(source.num_blocks(seq, 1) for source, seq in reached.items())
    num_points += _verify_layers(reader, key, sources, layer_blocks)
    with database.read() as conn:
        row = runs.get_run(conn, run_id, 1.8e9)
    assert row.rejected_records == 0, f"{run_id}: {row.rejected_records} refused"
    told = sum(source.num_blocks(seq, 2) for source, seq in reached.items())
    assert row.dropped_reports == told, f"{run_id}: {row.dropped_reports} counted, told {told}"
    return num_points


def _same(reader: SeriesReader, key: int, metric: str, rank: int | None, values: NDArray[np.float64]) -> int:
    """A series begins with exactly these points: every step from 0 on once, every value bit for bit."""
    found_steps, found_values = reader.raw(key, metric, rank)[:2]
    count = len(values)
    assert found_steps[:count].tolist() == list(range(count)), f"{metric}, rank {rank}: its steps"
    assert len(set(found_steps.tolist())) == len(found_steps), f"{metric}, rank {rank}: a step is double"
    found = np.ascontiguousarray(found_values[:count, 0]).view(np.uint64)
    assert (found == values.view(np.uint64)).all(), f"{metric}, rank {rank}: its values"
    return count


def _verify_layers(reader: SeriesReader, key: int, sources: list[Source], num_blocks: int) -> int:
    """Sums of squares add up over the ranks, each counted once."""
    size = sources[0].frame_steps
    steps, values = reader.raw(key, "layer/norm", None)[:2]
    assert steps[:num_blocks].tolist() == [block * size + size - 1 for block in range(num_blocks)]
    squares = np.array([block * size + 1.0 for block in range(num_blocks)]) * len(sources)
    expected = np.sqrt(squares).astype(np.float32).astype(np.float64)
    assert (values[:num_blocks] == expected[:, None]).all()
    return int(values[:num_blocks].size)


def main(arguments: list[str]) -> int:
    """Hammer one engine; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.crash_100", description=__doc__)
    parser.add_argument("--engine", choices=("sqlite", "postgresql"), required=True)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = PostgresCluster() if options.engine == "postgresql" else None
        url = f"sqlite:///{folder / 'a.db'}" if cluster is None else cluster.create_database()
        server = Server(url, folder, arguments=[], environment={})
        try:
            print(hammer(server.start(), times=options.times, seed=options.seed))
        finally:
            server.close()
            if cluster is not None:
                cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
