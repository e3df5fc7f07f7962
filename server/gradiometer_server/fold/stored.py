"""What the owner of a run finds in the store when it begins, and what it leaves there with every flush."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import Connection

from gradiometer import wire
from gradiometer_server.domain import names
from gradiometer_server.domain.alerts import Episode
from gradiometer_server.domain.folded import Layout
from gradiometer_server.domain.series import Series
from gradiometer_server.fold.judge import RuleState
from gradiometer_server.fold.run_fold import FoldMemory, FoldSource
from gradiometer_server.fold.times import MAX_STEPS
from gradiometer_server.store import alerts, log, runs
from gradiometer_server.store import series as series_store
from gradiometer_server.store.database import Database
from gradiometer_server.store.last_points import last_points
from gradiometer_server.summaries.codec import CorruptData

logger = logging.getLogger(__name__)

_MEMORY_KEY: Final = ("_fold", "")
"""The fold's own memory lies beside the states of the rules, because it is valid at the same offset."""


class OwnerMemory(msgspec.Struct, kw_only=True):
    """Valid at the offsets that are stored with it. `dropped`: reports the agent discarded, by source."""

    version: int = 1
    fold: FoldMemory = msgspec.field(default_factory=FoldMemory)
    episodes: tuple[Episode, ...] = ()
    dropped: dict[int, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSource:
    """A source, the last record it was told is durable, and the schemas it declared in records no longer in the log."""

    spec: FoldSource
    acked_seq: int
    schemas: tuple[wire.ScalarSchema | wire.LayerSchema, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A run as it was at its last flush."""

    run_id: str
    sources: tuple[LoadedSource, ...]
    layouts: tuple[Layout, ...]
    series: tuple[Series, ...]
    rule_states: tuple[RuleState, ...]
    memory: OwnerMemory


def load_run(database: Database, run_key: int) -> LoadedRun:
    """Read everything in one snapshot.

    Raises:
        StoreUnavailable: the database does not answer.
        NotFound: there is no such run.
    """
    with database.read() as conn:
        run = runs.get_run_by_key(conn, run_key, 0.0)
        sources = tuple(_load_source(conn, row) for row in runs.list_sources(conn, run_key))
        layouts = series_store.list_layouts(conn, run_key)
        series = tuple(row.series for row in series_store.list_series(conn, run_key))
        states = alerts.load_rule_states(conn, run_key)
        memory = _decode_memory(states.pop(_MEMORY_KEY, None))
        _recall_times(conn, memory.fold, series)
    return LoadedRun(
        run_id=run.id,
        sources=sources,
        layouts=layouts,
        series=series,
        rule_states=tuple((rule, key, base64.b64decode(text)) for (rule, key), text in states.items()),
        memory=memory,
    )


def load_source(database: Database, run_key: int, source_id: int) -> LoadedSource:
    """A source that has appeared since the run was loaded.

    Raises:
        StoreUnavailable: the database does not answer.
        NotFound: there is no such source.
    """
    with database.read() as conn:
        return _load_source(conn, runs.get_source(conn, run_key, source_id))


def _load_source(conn: Connection, row: runs.SourceRow) -> LoadedSource:
    records = log.read_schemas(conn, row.run_key, row.source_id)
    decoded = (wire.decode_record(data) for seq, data in records if seq <= row.folded_seq)
    return LoadedSource(
        spec=FoldSource(
            source_id=row.source_id,
            ordinal=row.ordinal,
            rank=row.rank,
            world_size=row.world_size,
            folded_seq=row.folded_seq,
            last_step=-1 if row.last_step is None else row.last_step,
            # While its log is not folded to the end, a source that has ended still has something to say.
            closed=row.closed and row.folded_seq >= row.acked_seq,
        ),
        acked_seq=row.acked_seq,
        schemas=tuple(one for one in decoded if isinstance(one, (wire.ScalarSchema, wire.LayerSchema))),
    )


def _recall_times(conn: Connection, memory: FoldMemory, series: Sequence[Series]) -> None:
    """A rank that is behind may give a step a time when the earlier one of another rank is in a chunk already."""
    for one in series:
        remembered = memory.attempts.get(one.attempt)
        if one.key == names.TIME and remembered is not None:
            try:
                remembered.times = last_points(conn, one, MAX_STEPS)
            except CorruptData as error:
                logger.error("run key %d: the times of its steps cannot be read: %s", one.run_key, error)


def _decode_memory(text: str | None) -> OwnerMemory:
    if text is None:
        return OwnerMemory()
    return msgspec.msgpack.decode(base64.b64decode(text), type=OwnerMemory)


def states_to_store(states: Sequence[RuleState], memory: OwnerMemory) -> Mapping[tuple[str, str], Any]:
    """Rule states and the owner's memory in the form that the store keeps (text)."""
    stored = {(rule, key): base64.b64encode(data).decode("ascii") for rule, key, data in states}
    stored[_MEMORY_KEY] = base64.b64encode(msgspec.msgpack.encode(memory)).decode("ascii")
    return stored
