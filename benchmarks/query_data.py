"""The database that `query.py` asks: written by the store's own flush, all points in chunks.

Only the 2,000,000 series rows of the runs list are inserted in bulk: they have statistics, as every series has, and no chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradiometer.wire import RunInfo, SourceInfo
from gradiometer_server.domain.names import TIME
from gradiometer_server.domain.series import Series, Tail
from gradiometer_server.store import chunks, runs
from gradiometer_server.store.database import Database
from gradiometer_server.store.series import SeriesKey, ensure_layout, ensure_series
from gradiometer_server.store.tables import run, series
from gradiometer_server.store.values import pack_float

LOSS = "train/loss"
TOKENS = "train/tokens"
LONG, LAYERS, MANY_LAYERS = "long", "layers-5k", "layers-200k"
LAUNCH_MS = 1_800_000_000_000
_PORTION = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is written."""

    long_steps: int = 1_000_000
    compared_runs: int = 100
    compared_steps: int = 10_000
    layers: int = 148
    layer_steps: int = 5_000
    many_layer_steps: int = 200_000
    listed_runs: int = 1_000
    names: int = 2_000


def compared(size: Size) -> list[str]:
    """Ids of the runs whose one metric is compared."""
    return [f"compared-{number:04}" for number in range(size.compared_runs)]


def listed(size: Size) -> list[str]:
    """Ids of the runs with many names."""
    return [f"listed-{number:04}" for number in range(size.listed_runs)]


def build(database: Database, size: Size) -> None:
    """Write everything; some minutes."""
    random = np.random.default_rng(1)
    _scalars(database, LONG, size.long_steps, random)
    for name in compared(size):
        _scalars(database, name, size.compared_steps, random)
    _layers(database, LAYERS, size.layer_steps, size.layers, random)
    _layers(database, MANY_LAYERS, size.many_layer_steps, size.layers, random)
    _names(database, size)


def _make_run(database: Database, run_id: str, last_step: int) -> int:
    with database.write() as conn:
        info = RunInfo(run_id=run_id, project="benchmark", name=run_id, created_s=LAUNCH_MS / 1000)
        key = runs.ensure_run(conn, info, LAUNCH_MS / 1000).run_key
        source = SourceInfo(rank=0, attempt=LAUNCH_MS, host="benchmark", started_s=LAUNCH_MS / 1000)
        row = runs.ensure_source(conn, key, source, LAUNCH_MS / 1000)
        plan = chunks.FlushPlan(run_key=key, flushes=())
        chunks.commit_flush(conn, plan, folded={}, last_steps={row.source_id: last_step})
    return key


def _flush(
    database: Database, one: Series, steps_N: NDArray[np.int64], values_NW: NDArray[np.float64]
) -> None:
    tail = Tail(steps_N=steps_N, values_NW=values_NW)
    plan = chunks.plan_flush(database, one.run_key, [(one, tail)])
    with database.write() as conn:
        chunks.commit_flush(conn, plan, folded={})


def _scalars(database: Database, run_id: str, steps: int, random: np.random.Generator) -> None:
    """A loss of float64 noise, tokens and times; a NaN and a spike among the losses."""
    key = _make_run(database, run_id, steps)
    steps_N = np.arange(1, steps + 1)
    loss_N = 4 / np.sqrt(1 + steps_N / 100) + 0.1 * random.standard_normal(steps)
    loss_N[steps // 3], loss_N[steps // 2] = np.nan, 1e6
    times_N = LAUNCH_MS / 1000 + np.cumsum(0.2 + 0.01 * random.random(steps))
    for name, values_N in ((LOSS, loss_N), (TIME, times_N), (TOKENS, steps_N * 4096.0)):
        one = _series(database, key, SeriesKey(key=name))
        for at in range(0, steps, _PORTION):
            part = slice(at, at + _PORTION)
            _flush(database, one, steps_N[part], values_N[part, None])


def _series(database: Database, key: int, wanted: SeriesKey) -> Series:
    with database.write() as conn:
        return ensure_series(conn, key, 1, [wanted])[wanted]


def _layers(database: Database, run_id: str, steps: int, layers: int, random: np.random.Generator) -> None:
    key = _make_run(database, run_id, steps)
    names = [f"blocks.{number // 4}.part{number % 4}.weight" for number in range(layers)]
    with database.write() as conn:
        layout = ensure_layout(conn, key, names, [1000] * layers)
    wanted = SeriesKey(key="layer/norm", kind="layer", width=layers, layout_id=layout.layout_id)
    one = _series(database, key, wanted)
    portion = _PORTION // layers
    for at in range(0, steps, portion):
        steps_N = np.arange(at + 1, min(at + portion, steps) + 1)
        values_NL = np.exp(0.3 * random.standard_normal((len(steps_N), layers)))
        _flush(database, one, steps_N, values_NL.astype(np.float32).astype(np.float64))


def _names(database: Database, size: Size) -> None:
    keys = [_make_run(database, name, 1000) for name in listed(size)]
    columns = [column.name for column in series.c]
    rows = (tuple(row[name] for name in columns) for key in keys for row in _rows(key, size.names))
    with database.write() as conn:
        driver = conn.connection.driver_connection
        assert driver is not None
        if database.is_sqlite:
            marks = ", ".join("?" * len(columns))
            driver.executemany(f"INSERT INTO series ({', '.join(columns)}) VALUES ({marks})", rows)
        else:
            quoted = ", ".join(f'"{name}"' for name in columns)
            with driver.cursor().copy(f"COPY series ({quoted}) FROM STDIN") as copy:
                for row in rows:
                    copy.write_row(row)
        conn.execute(run.update().where(run.c.run_id.in_(keys)).values(next_series_id=size.names + 1))
    if not database.is_sqlite:
        with database.write() as conn:
            conn.exec_driver_sql("ANALYZE")


def _rows(key: int, num_names: int) -> Iterator[dict[str, object]]:
    value = pack_float(2.5)
    for number in range(1, num_names + 1):
        name = LOSS if number == 1 else f"group{number % 20}/metric_{number:04}"
        yield {
            "run_id": key, "series_id": number, "attempt": 1, "key": name, "rank": None, "kind": "scalar", "width": 1,
            "layout_id": None, "version": 1, "num_points": 1000, "first_step": 1, "last_step": 1000, "last": value,
            "min": value, "max": value, "num_nonfinite": 0,
        }  # fmt: skip
