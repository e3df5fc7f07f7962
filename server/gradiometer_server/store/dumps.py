"""Where the flight recorders of a run saved steps: the places only, the dumps stay with the trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, bindparam, func, select

from gradiometer.wire import MAX_STEP
from gradiometer_server.store.statements import insert_or_ignore
from gradiometer_server.store.tables import dump, source
from gradiometer_server.store.values import clean_text

MAX_DUMPS: Final = 1000
"""Most of one run; agents save two per process unless told otherwise."""
_MAX_TEXT_CHARS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpRow:
    """One saved step. `rank`: where it went wrong; `attempt`: the ordinal."""

    attempt: int
    step: int
    rank: int
    host: str
    path: str
    reason: str
    num_bytes: int
    saved_s: float


_INSERT = insert_or_ignore(dump)
_COUNT = select(func.count()).where(dump.c.run_id == bindparam("of_run")).select_from(dump)
_DUMPS = (
    select(
        source.c.ordinal.label("attempt"), dump.c.step, dump.c.rank, dump.c.host, dump.c.path, dump.c.reason,
        dump.c.num_bytes, dump.c.saved_s,
    )
    .join(source, (source.c.run_id == dump.c.run_id) & (source.c.source_id == dump.c.source_id))
    .where(dump.c.run_id == bindparam("of_run"))
    .order_by(dump.c.saved_s, dump.c.step)
)  # fmt: skip


def add_dump(
    conn: Connection, run_key: int, source_id: int, step: int, time_s: float, attributes: Mapping[str, Any]
) -> None:
    """Note a `dump` event; one that is there, or is one too many, changes nothing."""
    if int(conn.execute(_COUNT, {"of_run": run_key}).scalar_one()) >= MAX_DUMPS:
        return
    texts = {
        name: clean_text(str(attributes.get(name) or ""))[:_MAX_TEXT_CHARS]
        for name in ("host", "path", "reason")
    }
    numbers = {"rank": _whole(attributes.get("rank")), "num_bytes": _whole(attributes.get("bytes"))}
    saved_s = time_s if math.isfinite(time_s) else 0.0
    row = {"run_id": run_key, "source_id": source_id, "step": step, "saved_s": saved_s, **texts, **numbers}
    conn.execute(_INSERT.on(conn), row)


def list_dumps(conn: Connection, run_key: int) -> tuple[DumpRow, ...]:
    """All of a run, oldest first."""
    return tuple(DumpRow(**row._mapping) for row in conn.execute(_DUMPS, {"of_run": run_key}))


def _whole(value: object) -> int:
    return min(max(value, 0), MAX_STEP) if isinstance(value, int) else 0
