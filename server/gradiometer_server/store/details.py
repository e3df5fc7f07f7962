"""What single ranks sent of themselves in `wire.Detail` records (rings, histograms), kept beside the merged series.

Written by the fold under the number of the record, so that a replay changes nothing. Shape letters: N steps, W values
of a step (layers times statistics, or times bins), L layers, B bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Row, bindparam, func, select

from gradiometer import wire
from gradiometer_server.domain.histograms import RankHistograms, counts_of
from gradiometer_server.store.log import read_schemas
from gradiometer_server.store.statements import insert_or_ignore
from gradiometer_server.store.tables import detail, source
from gradiometer_server.store.values import clean_text
from gradiometer_server.summaries.codec import CorruptData, decode_values, encode_values, pack, unpack

MAX_SOURCE_BYTES: Final = 1024 * 1024 * 1024
"""Most values of one source, before compression: twice what the agent's own limits let it send."""

SourceDetail = tuple[int, int, wire.Detail]
"""(source id, record number, record)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailPart:
    """One stored record, without its values: which steps of which rank, and why."""

    source_id: int
    seq: int
    attempt: int
    rank: int
    reason: str
    trigger_step: int | None
    schema_id: int
    step0: int
    step1: int
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSteps:
    """Values of one schema of one rank: steps int64 (N,), values (N, W), and what the columns are."""

    schema: wire.LayerSchema
    steps_N: NDArray[np.int64]
    values_NW: NDArray[np.float64]


_INSERT = insert_or_ignore(detail)
_HELD = (
    select(func.coalesce(func.sum(detail.c.num_bytes), 0))
    .where(detail.c.run_id == bindparam("of_run"), detail.c.source_id == bindparam("of_source"))
)  # fmt: skip
_IS_THERE = select(detail.c.seq).where(
    detail.c.run_id == bindparam("of_run"),
    detail.c.source_id == bindparam("of_source"),
    detail.c.seq == bindparam("of_seq"),
)
_PARTS = (
    select(
        detail.c.source_id, detail.c.seq, source.c.ordinal.label("attempt"), source.c.rank, detail.c.reason,
        detail.c.trigger_step, detail.c.schema_id, detail.c.step0, detail.c.step1, detail.c.n,
    )
    .join(source, (source.c.run_id == detail.c.run_id) & (source.c.source_id == detail.c.source_id))
    .where(detail.c.run_id == bindparam("of_run"), detail.c.kind == bindparam("of_kind"))
    .order_by(source.c.attempt, source.c.rank, detail.c.step0, detail.c.seq)
)  # fmt: skip
_PARTS_AND_STEPS = _PARTS.add_columns(detail.c.steps)
_VALUES = select(detail.c.n, detail.c.width, detail.c.steps, detail.c.data).where(
    detail.c.run_id == bindparam("of_run"),
    detail.c.source_id == bindparam("of_source"),
    detail.c.seq == bindparam("of_seq"),
)


def add_details(conn: Connection, run_key: int, details: Iterable[SourceDetail]) -> int:
    """Store records; returns how many were left out because their source has sent too much already."""
    num_refused = 0
    for source_id, seq, record in details:
        place = {"of_run": run_key, "of_source": source_id}
        if conn.execute(_IS_THERE, {**place, "of_seq": seq}).first() is not None:
            continue
        held = int(conn.execute(_HELD, place).scalar_one())
        if held + len(record.values) > MAX_SOURCE_BYTES:
            num_refused += 1
            continue
        conn.execute(_INSERT.on(conn), _row(run_key, source_id, seq, record))
    return num_refused


def _row(run_key: int, source_id: int, seq: int, record: wire.Detail) -> dict[str, object]:
    width, data = _packed(record)
    return {
        "run_id": run_key,
        "source_id": source_id,
        "seq": seq,
        "kind": record.kind,
        "reason": clean_text(record.reason),
        "trigger_step": record.trigger_step,
        "schema_id": record.schema_id,
        "step0": min(record.steps),
        "step1": max(record.steps),
        "n": len(record.steps),
        "width": width,
        "num_bytes": len(record.values),
        "steps": pack(np.array(record.steps, dtype=np.int64)),
        "times": pack(np.array(record.times, dtype=np.float64)),
        "data": data,
    }


def _packed(record: wire.Detail) -> tuple[int, bytes]:
    """Width of a step, and the values as they are stored."""
    if record.kind == "histogram":
        counts_NLB = counts_of(record)
        return counts_NLB[0].size, pack(counts_NLB.astype(np.int64))
    values_NW = np.frombuffer(record.values, dtype="<f8").reshape(len(record.steps), -1)
    return values_NW.shape[1], encode_values(values_NW)


def detail_problem(row: Row[Any]) -> str | None:
    """What is wrong with a row of table `detail`, or None: it must decode to what its other columns say."""
    try:
        steps, times = unpack(row.steps, row.n), unpack(row.times, row.n)
        if row.kind == "histogram":
            size = 4 * unpack(row.data, row.n * row.width).size
        else:
            size = decode_values(row.data, row.n, row.width).nbytes
    except CorruptData as error:
        return error.message
    if (int(steps.min()), int(steps.max())) != (row.step0, row.step1):
        return f"its steps are {steps.min()} to {steps.max()}, but its row says {row.step0} to {row.step1}"
    if not np.isfinite(times).all():
        return "a step has no time"
    return None if size == row.num_bytes else f"it holds {size} bytes, but its row says {row.num_bytes}"


def columns_of(kind: str, schema: wire.LayerSchema | None) -> list[str] | None:
    """What the last axis of `values_of` is; None: nobody knows any more."""
    if kind == "histogram":
        return [f"bin {number}" for number in range(wire.HISTOGRAM_BINS)]
    return None if schema is None else list(schema.statistics)


def values_of(row: Row[Any], schema: wire.LayerSchema | None) -> NDArray[Any]:
    """Values of a row of table `detail` (N, L, C), (N, W) without its schema. Raises `CorruptData`."""
    if row.kind == "histogram":
        counts: NDArray[Any] = unpack(row.data, row.n * row.width).reshape(row.n, -1, wire.HISTOGRAM_BINS)
        return counts
    values_NW = decode_values(row.data, row.n, row.width)
    return values_NW if schema is None else values_NW.reshape(row.n, len(schema.layers), -1)


def list_parts(conn: Connection, run_key: int, kind: str = "ring") -> tuple[DetailPart, ...]:
    """All stored parts of one kind of a run's details, by launch, rank and step."""
    places = {"of_run": run_key, "of_kind": kind}
    return tuple(DetailPart(**row._mapping) for row in conn.execute(_PARTS, places))


def read_steps(conn: Connection, run_key: int, parts: Sequence[DetailPart]) -> list[RingSteps]:
    """Values of these parts, in their order. Parts whose schema is gone are left out. Raises `CorruptData`."""
    schemas: dict[int, dict[int, wire.LayerSchema]] = {}
    found = []
    for part in parts:
        if part.source_id not in schemas:
            schemas[part.source_id] = _layer_schemas(conn, run_key, part.source_id)
        schema = schemas[part.source_id].get(part.schema_id)
        if schema is None:
            continue
        place = {"of_run": run_key, "of_source": part.source_id, "of_seq": part.seq}
        row = conn.execute(_VALUES, place).one()
        found.append(
            RingSteps(
                schema=schema,
                steps_N=unpack(row.steps, row.n),
                values_NW=decode_values(row.data, row.n, row.width),
            )
        )
    return found


def list_histograms(conn: Connection, run_key: int) -> list[tuple[DetailPart, NDArray[np.int64]]]:
    """All stored records with histograms, by launch, rank and step, and the steps (N,) of each."""
    places = {"of_run": run_key, "of_kind": "histogram"}
    found = conn.execute(_PARTS_AND_STEPS, places).mappings()
    return [
        (
            DetailPart(**{name: value for name, value in row.items() if name != "steps"}),
            unpack(row["steps"], row["n"]),
        )
        for row in found
    ]


def read_histograms(
    conn: Connection, run_key: int, parts: Sequence[DetailPart], step: int
) -> list[RankHistograms]:
    """What these records hold of one step. Parts whose schema is gone are left out. Raises `CorruptData`."""
    found = []
    for part in parts:
        schema = _layer_schemas(conn, run_key, part.source_id).get(part.schema_id)
        if schema is None:
            continue
        place = {"of_run": run_key, "of_source": part.source_id, "of_seq": part.seq}
        row = conn.execute(_VALUES, place).one()
        counts_NLB = unpack(row.data, row.n * row.width).reshape(row.n, -1, wire.HISTOGRAM_BINS)
        at = int(np.argmax(unpack(row.steps, row.n) == step))
        found.append(RankHistograms(rank=part.rank, schema=schema, counts_LB=counts_NLB[at]))
    return found


def _layer_schemas(conn: Connection, run_key: int, source_id: int) -> dict[int, wire.LayerSchema]:
    decoded = (wire.decode_record(data) for _, data in read_schemas(conn, run_key, source_id))
    return {one.schema_id: one for one in decoded if isinstance(one, wire.LayerSchema)}
