"""Runs that are folded into a real database by hand, and everything that is stored of them, as bytes under public names.

Ids that are given out in order of arrival (of sources, series, layouts) are replaced by what they stand for: two runs
that were told the same in different orders must then be equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select

from gradiometer import wire
from gradiometer_server.domain.names import run_key
from gradiometer_server.fold.batch import Batch
from gradiometer_server.fold.owner import RunOwner
from gradiometer_server.store import log, runs
from gradiometer_server.store.database import Database
from gradiometer_server.store.log import LogWriter
from gradiometer_server.store.tables import chunk, layout, series, source

FIRST_LAUNCH = 1_800_000_000_000
COMMIT_S = 30.0


class HandClock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def now_s(self) -> float:
        return 1.8e9 + self.elapsed_s

    def monotonic_s(self) -> float:
        return 1000.0 + self.elapsed_s


@dataclasses.dataclass(frozen=True)
class Writer:
    """One rank of one attempt, and all that it will say, in its order."""

    attempt: int
    rank: int
    world_size: int
    records: tuple[wire.Record, ...] = dataclasses.field(repr=False)
    start_step: int = 0

    @property
    def info(self) -> wire.SourceInfo:
        return wire.SourceInfo(
            rank=self.rank,
            attempt=FIRST_LAUNCH + self.attempt,
            world_size=self.world_size,
            start_step=self.start_step,
        )


class FoldedRun:
    """A run in a database whose records are made durable, folded, stored and forgotten when a test says so."""

    def __init__(self, database: Database, log_writer: LogWriter, run_id: str, clock: HandClock) -> None:
        self.database, self.run_id, self.key, self.clock = database, run_id, run_key(run_id), clock
        self._log = log_writer
        self._sources: dict[tuple[int, int], int] = {}
        info = wire.RunInfo(run_id=run_id, project="tests", name=run_id, created_s=1.8e9)
        with database.write() as conn:
            runs.ensure_run(conn, info, 1.8e9)

    def put(self, writer: Writer, first: int, end: int) -> Batch:
        """Commit records first..end (exclusive) of a writer to the log; the batch is what ingest hands on."""
        batch = self.batch(writer, first, end)
        encoded = [(seq, wire.encode(record)) for seq, record in batch.entries]
        self._log.submit(self.key, batch.source_id, first + 1, encoded, end).result(COMMIT_S)
        return batch

    def batch(self, writer: Writer, first: int, end: int) -> Batch:
        """Records first..end (exclusive) of a writer, without committing them."""
        return Batch(
            run_key=self.key,
            source_id=self._source_id(writer),
            first_seq=first + 1,
            last_seq=end,
            entries=tuple(enumerate(writer.records, 1))[first:end],
            num_bytes=1000 * (end - first),
        )

    def _source_id(self, writer: Writer) -> int:
        """The source appears when its rank connects, perhaps in the middle of the run."""
        name = (writer.attempt, writer.rank)
        if name not in self._sources:
            with self.database.write() as conn:
                found = runs.ensure_source(conn, self.key, writer.info, 1.8e9)
            self._sources[name] = found.source_id
        return self._sources[name]

    def owner(self) -> RunOwner:
        """An owner as a server makes it at its start: from the stored offsets and the log."""
        return RunOwner(
            database=self.database, clock=self.clock, run_key=self.key, publish=lambda updates: None
        )

    def left_in_log(self) -> int:
        """Records that are not folded away."""
        with self.database.read() as conn:
            return sum(
                len(log.read_frames(conn, self.key, source_id, 0, 10**9))
                for source_id in self._sources.values()
            )

    def stored(self) -> dict[tuple[object, ...], list[tuple[object, ...]]]:
        """By (launch, metric, rank, layers): the row of the series and the rows of its chunks, byte for byte."""
        with self.database.read() as conn:
            launches = dict(
                conn.execute(
                    select(source.c.ordinal, source.c.attempt).where(source.c.run_id == self.key)
                ).all()
            )
            layouts = {
                row.layout_id: (row.names, row.numels)
                for row in conn.execute(select(layout).where(layout.c.run_id == self.key))
            }
            every = conn.execute(select(series).where(series.c.run_id == self.key)).all()
            names = {
                row.series_id: (launches[row.attempt], row.key, row.rank, layouts.get(row.layout_id))
                for row in every
            }
            found = {names[row.series_id]: [_figures(row)] for row in every if row.num_points}
            blocks = (
                select(chunk).where(chunk.c.run_id == self.key).order_by(chunk.c.series_id, chunk.c.step0)
            )
            for row in conn.execute(blocks):
                found[names[row.series_id]].append(_without_ids(row))
        return found


def _figures(row: Any) -> tuple[object, ...]:
    return (
        row.kind, row.width, row.num_points, row.first_step, row.last_step, row.last, row.min, row.max,
        row.num_nonfinite,
    )  # fmt: skip


def _without_ids(row: Any) -> tuple[object, ...]:
    return tuple(value for name, value in row._mapping.items() if name not in ("run_id", "series_id"))


def differences(left: dict[Any, Any], right: dict[Any, Any]) -> list[object]:
    """Names of what is only on one side or differs: a dictionary of blobs is nothing to look at."""
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]


def fold_in_order(run: FoldedRun, ordered: Sequence[tuple[Writer, int]]) -> None:
    """The reference: one owner, record by record, never interrupted."""
    owner = run.owner()
    for writer in {id(writer): writer for writer, _ in ordered}.values():
        run.put(writer, 0, len(writer.records))
    for writer, index in ordered:
        owner.take(run.batch(writer, index, index + 1))
    finish(run, owner)


def finish(run: FoldedRun, owner: RunOwner) -> None:
    """Let so much time pass that nobody is waited for, and store everything."""
    run.clock.elapsed_s += 60.0
    owner.tick()
    owner.flush()
