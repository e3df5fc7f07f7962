"""Ranks, attempts, duplicates and restarts in any order leave the same bytes in a real database as the ordered stream.

What varies: worlds of 1 to 4 ranks that join while the run goes on and leave it (in order, or killed); up to three
attempts over the same steps, told in any order; several schemas, also declared in the middle; frames of one or many
steps with gaps; layers that are added; steps that are told again before the next one; batches sent twice; restarts
before the fold, after it, in the middle of a flush and after it. Values are hostile: NaN payloads, infinities, -0.0,
subnormals, 1e308.

What may not vary: a rank's steps rise, as the agent has it. Beyond `SILENCE_S` of silence, and more than 256 steps
behind, what comes late is merged differently or not at all; that is documented, and tested elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gradiometer import wire
from gradiometer_server.clock import SystemClock
from gradiometer_server.fold.owner import RunOwner
from gradiometer_server.store import chunks
from gradiometer_server.store.database import open_database
from gradiometer_server.store.log import LogWriter
from gradiometer_server.store.maintenance import check
from tests.support.fold_store import FoldedRun, HandClock, Writer, differences, finish, fold_in_order
from tests.support.postgres import PostgresCluster

NUM_LAYERS = 3
HOSTILE = (
    math.nan,
    struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))[0],  # a quiet NaN with a payload
    struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000000))[0],  # a negative one
    math.inf,
    -math.inf,
    -0.0,
    5e-324,
    1e-320,
    2.0**-149,
    1e308,
    -1.7976931348623157e308,
    0.1,
    16777217.0,  # the first whole number that float32 cannot hold
)
numbers = itertools.count(1)


class Store:
    """A database and its log, opened once for all examples: making one takes longer than an example."""

    def __init__(self, url: str) -> None:
        self.database = open_database(url, clock=SystemClock())
        self.log_writer = LogWriter(self.database)
        self.log_writer.start()

    def run(self) -> FoldedRun:
        return FoldedRun(self.database, self.log_writer, f"run-{next(numbers)}", HandClock())

    def close(self) -> None:
        self.log_writer.stop(10.0)
        self.database.close()


@pytest.fixture(scope="module")
def sqlite() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{Path(folder) / 'a.db'}")
        yield store
        store.close()


def value(chance: random.Random) -> float:
    return chance.choice(HOSTILE) if chance.random() < 0.2 else chance.gauss(0.0, 3.0)


def partials(chance: random.Random, statistics: tuple[str, ...]) -> list[float]:
    """What a rank says of one layer: mostly a gradient, sometimes none, sometimes a broken one."""
    found = {name: abs(value(chance)) for name in statistics}
    found["count"] = chance.choice([8.0, 8.0, 8.0, 0.0])
    found["num_nonfinite"] = chance.choice([0.0, 0.0, 0.0, 2.0])
    return [found[name] for name in statistics]


@dataclasses.dataclass(frozen=True)
class World:
    """What all ranks of an attempt have in common."""

    attempt: int
    size: int
    steps: tuple[int, ...]
    sharded: bool
    merges: dict[str, str]
    grows_at: int
    layers_first: bool


def schemas_of(world: World, rank: int, chance: random.Random) -> list[wire.Record]:
    layers = tuple(
        wire.Layer(
            name=f"layer{i}" if world.sharded else f"stage{rank}.layer{i}",
            shape=(8 * world.size,),
            numel=8 * world.size,
            shard=(rank,) if world.sharded and world.size > 1 else (),
            num_shards=world.size if world.sharded else 1,
        )
        for i in range(NUM_LAYERS)
    )
    few = tuple(name for name in wire.STATISTICS if name in wire.NORM_STATISTICS or chance.random() < 0.5)
    own = [] if chance.random() < 0.5 else [f"rank{rank}/own"]
    columns = tuple(wire.Column(name, world.merges[name]) for name in world.merges)  # type: ignore[arg-type]
    return [
        wire.ScalarSchema(schema_id=1, columns=columns + tuple(wire.Column(name) for name in own)),
        wire.ScalarSchema(schema_id=4, columns=(wire.Column("val/loss"), columns[0])),
        wire.LayerSchema(schema_id=2, layers=layers),
        wire.LayerSchema(schema_id=3, layers=layers, statistics=few),
    ]


def more_layers(world: World, rank: int) -> wire.LayerSchema:
    """A second optimizer's layers, declared while the run goes on: the layout grows from there."""
    shard = (rank,) if world.sharded and world.size > 1 else ()
    name = "more" if world.sharded else f"stage{rank}.more"
    layer = wire.Layer(name, (8 * world.size,), 8 * world.size, shard, world.size if world.sharded else 1)
    return wire.LayerSchema(schema_id=5, layers=(layer,))


def said_by(world: World, rank: int, steps: tuple[int, ...], chance: random.Random) -> list[wire.Record]:
    """Schemas, one of them late; then scalars and layers of every step, in frames of one to four steps."""
    first, late, *layers = schemas_of(world, rank, chance)
    said: list[wire.Record] = [first, *layers]
    late_at = chance.choice(range(len(steps) + 1))
    more = more_layers(world, rank)
    place = 0
    while place < len(steps):
        some = steps[place : place + chance.randint(1, 4)]
        grown = some[0] >= world.grows_at
        if not grown and some[-1] >= world.grows_at:
            some = tuple(step for step in some if step < world.grows_at)
        if grown and more not in said:
            said.append(more)
        scalars = [frame(first, some, rank, chance)]
        for _ in range(chance.choice([0, 0, 0, 1, 3])):
            # As a loop does that logs at every micro-batch: the last word on a step counts.
            scalars.append(frame(first, some[-1:], rank, chance))
        if late is not None and place >= late_at:
            scalars.append(late)
            late_at, declared, late = len(steps) + 1, late, None
        elif late is None and chance.random() < 0.5:
            scalars.append(frame(declared, some[-1:], rank, chance))
        of_layers: list[wire.Record] = []
        for one in ((step,) for step in some) if grown or chance.random() < 0.5 else (some,):
            of_layers.append(frame(chance.choice(layers), one, rank, chance))
            if grown:
                of_layers.append(frame(more, one, rank, chance))
        # The agent's come before the scalars of their steps.
        said += [*of_layers, *scalars] if world.layers_first else [*scalars, *of_layers]
        place += len(some)
    return said


def frame(schema: wire.Record, steps: tuple[int, ...], rank: int, chance: random.Random) -> wire.Frame:
    if isinstance(schema, wire.LayerSchema):
        width_of = [partials(chance, schema.statistics) for _ in range(len(schema.layers) * len(steps))]
        row = [number for layer in width_of for number in layer]
    else:
        assert isinstance(schema, wire.ScalarSchema)
        row = [value(chance) for _ in range(len(schema.columns) * len(steps))]
    return wire.Frame(
        schema_id=schema.schema_id,
        steps=steps,
        times=tuple(1.8e9 + step + rank / 8 for step in steps),
        values=np.array(row, "<f8").tobytes(),
    )


class Story:
    """All that the ranks of all attempts say. Told in short where an example fails: the records are megabytes."""

    def __init__(self, writers: list[Writer]) -> None:
        self.writers = writers

    def __repr__(self) -> str:
        return f"Story({self.writers})"

    def in_order(self) -> list[tuple[Writer, int]]:
        """Attempt by attempt, step by step, rank by rank."""
        keyed = []
        for writer in self.writers:
            step = -1
            for index, record in enumerate(writer.records):
                step = max(record.steps[-1], step) if isinstance(record, wire.Frame) else step
                keyed.append(((writer.attempt, step, writer.rank, index), (writer, index)))
        return [item for _, item in sorted(keyed, key=lambda one: one[0])]


def story_of(chance: random.Random) -> Story:
    """Up to three attempts with up to four ranks each."""
    writers: list[Writer] = []
    for attempt in range(1, chance.choice([1, 1, 2, 3]) + 1):
        begin = chance.randint(0, 30)
        grows_at = chance.choice([10**9, 10**9, begin + 20])
        names = chance.sample(["train/loss", "lr", "memory", "tokens"], chance.randint(1, 4))
        world = World(
            attempt=attempt,
            size=chance.randint(1, 4),
            steps=tuple(sorted(chance.sample(range(begin, begin + 60), chance.choice([1, 3, 12, 30])))),
            sharded=chance.random() < 0.5,
            grows_at=grows_at,
            layers_first=chance.random() < 0.5,
            merges={name: chance.choice(["mean", "sum", "min", "max"]) for name in names},
        )
        writers += [writer_of(world, rank, chance) for rank in range(world.size)]
    return Story(writers)


def writer_of(world: World, rank: int, chance: random.Random) -> Writer:
    """A rank that stays to the end, joins in the middle, leaves there, or is killed there."""
    fate = chance.choice(["stays", "stays", "joins", "leaves", "killed"])
    half, steps = len(world.steps) // 2, world.steps
    if fate == "joins" and world.sharded:
        steps = steps[half:]
    if fate in ("leaves", "killed"):
        steps = steps[: half + 1]
    said = said_by(world, rank, steps, chance)
    if fate != "killed":
        said.append(wire.Event(kind="exit", time=1.9e9, attributes={"code": 0}))
    return Writer(attempt=world.attempt, rank=rank, world_size=world.size, records=tuple(said))


class Crash(Exception):
    """The process ends here."""


def crash_in_flush(owner: RunOwner, chance: random.Random) -> None:
    """Everything of a flush but its commit; or its commit too, and nothing of what comes after."""
    commit, after = chunks.commit_flush, chance.random() < 0.5

    def committed(*args: object, **keywords: object) -> None:
        if after:
            commit(*args, **keywords)  # type: ignore[arg-type]
        raise Crash

    with mock.patch.object(chunks, "commit_flush", committed), contextlib.suppress(Crash):
        owner.flush()


def tell_in_any_order(run: FoldedRun, writers: list[Writer], chance: random.Random) -> None:
    """Batches of the writers in any order; some twice, with restarts of the fold wherever they hurt."""
    burst = chance.choice([1, 3, 10, 60])
    position = {id(writer): 0 for writer in writers}
    owner = None
    while open_writers := [w for w in writers if position[id(w)] < len(w.records)]:
        writer = chance.choice(open_writers)
        first = position[id(writer)]
        end = min(first + chance.randint(1, burst), len(writer.records))
        batch = run.put(writer, first, end)
        position[id(writer)] = end
        what = chance.choice(
            ["take"] * 6 + ["flush", "twice", "again", "crash before", "crash after", "crash in flush"]
        )
        owner = owner or run.owner()
        if what != "crash before":
            owner.take(batch)
        if what == "twice":
            owner.take(batch)
        if what == "again":  # from an earlier record on, as an agent resends after a lost ack
            owner.take(run.put(writer, chance.randint(0, first), end))
        if what == "flush":
            owner.flush()
        if what == "crash in flush":
            crash_in_flush(owner, chance)
        if what.startswith("crash"):
            owner = None
    finish(run, owner or run.owner())


def check_story(store: Store, seed: int) -> None:
    chance = random.Random(seed)
    story, reference, run = story_of(chance), store.run(), store.run()
    fold_in_order(reference, story.in_order())
    tell_in_any_order(run, story.writers, chance)
    stored, expected = run.stored(), reference.stored()
    assert differences(stored, expected) == []
    assert expected
    if all(isinstance(writer.records[-1], wire.Event) for writer in story.writers):
        # A rank that did not say that it ended may still have something to say of a step.
        assert run.left_in_log() == reference.left_in_log() == 0


# Without shrinking: an example is a seed, and a smaller seed is no simpler story.
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_any_order_and_any_restarts_leave_the_same_bytes(sqlite: Store, seed: int) -> None:
    check_story(sqlite, seed)


def test_the_database_of_all_these_runs_passes_the_check(sqlite: Store) -> None:
    assert list(check(sqlite.database)) == []


@pytest.fixture(scope="module")
def postgresql(postgres_cluster: PostgresCluster) -> Iterator[Store]:
    url = postgres_cluster.create_database()
    store = Store(url)
    yield store
    store.close()
    postgres_cluster.drop_database(url)


@pytest.mark.postgres
@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_so_it_is_on_postgresql(postgresql: Store, seed: int) -> None:
    check_story(postgresql, seed)
