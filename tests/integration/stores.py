"""Runs, series and points in a real database, for the tests of the store."""

from __future__ import annotations

import numpy as np

from gradiometer import wire
from gradiometer_server.domain.series import Series, Tail
from gradiometer_server.store import chunks, runs, series
from gradiometer_server.store.database import Database
from gradiometer_server.store.series import SeriesKey

LOSS = SeriesKey(key="train/loss")
WAIT_S = 30.0
SCHEMA = wire.encode(wire.ScalarSchema(schema_id=1, columns=(wire.Column("train/loss"),)))


def info(run_id: str = "r", **changed: object) -> wire.RunInfo:
    fields: dict[str, object] = {"run_id": run_id, "project": "p", "name": "n", "created_s": 1.0}
    return wire.RunInfo(**{**fields, **changed})  # type: ignore[arg-type]


def new_run(
    database: Database, run_id: str = "r", *, attempts: tuple[tuple[int, int], ...] = ((1000, 0),)
) -> int:
    """A run with a source of rank 0 for each (launch, start step); returns its key."""
    with database.write() as conn:
        run = runs.ensure_run(conn, info(run_id), 1.0)
        for launch, start in attempts:
            runs.ensure_source(
                conn, run.run_key, wire.SourceInfo(rank=0, attempt=launch, start_step=start), 1.0
            )
    return run.run_key


def new_series(database: Database, key: int, attempt: int, *names: SeriesKey) -> list[Series]:
    with database.write() as conn:
        return list(series.ensure_series(conn, key, attempt, names).values())


def tail(steps: object, values: object) -> Tail:
    array = np.asarray(values, np.float64)
    return Tail(steps_N=np.asarray(steps, np.int64), values_NW=array.reshape(len(array), -1))


def flush(
    database: Database, key: int, *points: tuple[Series, Tail], folded: dict[int, int] | None = None
) -> None:
    plan = chunks.plan_flush(database, key, points)
    with database.write() as conn:
        chunks.commit_flush(conn, plan, folded=folded or {})


def bits(values: np.ndarray) -> list[int]:
    return np.ascontiguousarray(values).view(np.uint64).reshape(-1).tolist()


def records(first: int, last: int) -> list[tuple[int, bytes]]:
    frames = [
        (seq, wire.encode(wire.Frame(schema_id=1, steps=(seq,), times=(0.0,), values=bytes(8))))
        for seq in range(first, last + 1)
    ]
    return [(seq, SCHEMA if seq == 1 else data) for seq, data in frames]
