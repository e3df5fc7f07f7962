"""A flush: folded points become chunks, in two parts, so that encoding never holds the only write lock.

`plan_flush` reads the chunks that the new points fall into, merges (later wins) and encodes; `commit_flush` writes
everything in one transaction: chunks, statistics of series, the fold's offsets, states of rules, and the end of the
folded frames. One owner folds a run, so nothing else changes its series; the commit checks that all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, func, select, update

from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.series import Series, Tail
from gradiometer_server.errors import GradiometerError
from gradiometer_server.store.alerts import RuleKey, save_rule_states
from gradiometer_server.store.database import Database
from gradiometer_server.store.runs import count_rejected
from gradiometer_server.store.series import SeriesRow, series_row_from
from gradiometer_server.store.tables import chunk, frame, series, source
from gradiometer_server.store.values import pack_float
from gradiometer_server.summaries.blocks import Block, decode_points, encode_points
from gradiometer_server.summaries.partition import (
    Part,
    Span,
    chunk_capacity,
    last_wins,
    outside,
    place,
    split,
)

BLOCK_COLUMNS: Final = tuple(column for column in chunk.c if column.name not in ("run_id", "series_id"))

_LOST: Final = "points came for steps whose raw points were dropped to save space (retention)"


class FlushConflict(GradiometerError):
    """Somebody else changed the series between plan and commit; nothing was written."""

    code = "flush_conflict"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesFlush:
    """What a flush does to one series: chunks by `step0` that go, blocks that come, statistics afterwards."""

    version: int
    after: SeriesRow
    removed: tuple[int, ...]
    added: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushPlan:
    """Encoded and ready to commit. `num_lost`: points inside chunks that were thinned, which cannot take them in."""

    run_key: int
    flushes: tuple[SeriesFlush, ...]
    num_lost: int = 0


_OF_SERIES = (chunk.c.run_id == bindparam("of_run"), chunk.c.series_id == bindparam("of_series"))
_SERIES = select(series).where(
    series.c.run_id == bindparam("of_run"), series.c.series_id.in_(bindparam("ids", expanding=True))
)
_before = chunk.alias()
# The chunk before the first new step may take it in; whether it does depends on the one before that.
_SPANS = (
    select(chunk.c.step0, chunk.c.step1, chunk.c.n)
    .where(
        *_OF_SERIES,
        chunk.c.step0
        >= func.coalesce(
            select(_before.c.step0)
            .where(
                _before.c.run_id == bindparam("of_run"),
                _before.c.series_id == bindparam("of_series"),
                _before.c.step0 <= bindparam("first"),
            )
            .order_by(_before.c.step0.desc())
            .limit(1)
            .offset(1)
            .scalar_subquery(),
            -1,
        ),
    )
    .order_by(chunk.c.step0)
)
_BLOCKS = (
    select(*BLOCK_COLUMNS)
    .where(*_OF_SERIES, chunk.c.step0.in_(bindparam("begins", expanding=True)))
    .order_by(chunk.c.step0)
)
_EXTREMES = select(func.min(chunk.c.min), func.max(chunk.c.max)).where(
    *_OF_SERIES, chunk.c.step0.not_in(bindparam("begins", expanding=True))
)
_DELETE_CHUNK = chunk.delete().where(*_OF_SERIES, chunk.c.step0 == bindparam("begin"))
_UPDATE_SERIES = update(series).where(
    series.c.run_id == bindparam("of_run"),
    series.c.series_id == bindparam("of_series"),
    series.c.version == bindparam("before"),
)
_FOLDED = (
    update(source)
    .where(source.c.run_id == bindparam("of_run"), source.c.source_id == bindparam("of_source"))
    .where(source.c.folded_seq <= bindparam("seq"), source.c.acked_seq >= bindparam("seq"))
    .values(folded_seq=bindparam("seq"))
)
_LAST_STEP = (
    update(source)
    .where(source.c.run_id == bindparam("of_run"), source.c.source_id == bindparam("of_source"))
    .where(func.coalesce(source.c.last_step, -1) < bindparam("step"))
    .values(last_step=bindparam("step"))
)
_DELETE_FRAMES = frame.delete().where(
    frame.c.run_id == bindparam("of_run"),
    frame.c.source_id == bindparam("of_source"),
    frame.c.seq <= bindparam("seq"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the plan read of one series: its row, the parts that the new points fall into, the chunks there."""

    row: SeriesRow
    version: int
    steps_N: NDArray[np.int64]
    values_NW: NDArray[np.float64]
    parts: Sequence[Part]
    blocks: Mapping[int, Block]
    spans: Sequence[Span]
    others: tuple[float | None, float | None]
    num_lost: int


def plan_flush(
    database: Database, run_key: int, points: Mapping[int, Tail] | Sequence[tuple[Series, Tail]]
) -> FlushPlan:
    """Read, merge and encode. `points`: new points by series id (or as pairs), in the order in which they came.

    Steps may repeat and go back: the later entry wins, also over the chunks.

    Raises:
        StoreUnavailable: the database cannot be read.
        CorruptData: a chunk that has to be merged is damaged.
        ValueError: an unknown series, or values of another width than the series has.
    """
    if not isinstance(points, Mapping):
        points = {one.series_id: tail for one, tail in points}
    tails = {key: tail for key, tail in points.items() if len(tail.steps_N)}
    with database.read() as conn:
        rows = conn.execute(_SERIES, {"of_run": run_key, "ids": list(tails)}).all()
        if len(rows) != len(tails):
            unknown = sorted(set(tails) - {row.series_id for row in rows})
            raise ValueError(f"run {run_key} has no series {unknown}")
        found = [_find(conn, series_row_from(row), row.version, tails[row.series_id]) for row in rows]
    flushes = tuple(_encode(one) for one in found if len(one.steps_N))
    return FlushPlan(run_key=run_key, flushes=flushes, num_lost=sum(one.num_lost for one in found))


def _find(conn: Connection, row: SeriesRow, version: int, tail: Tail) -> _Found:
    steps, values = last_wins(*_arrays(tail, row.series.width))
    find = {"of_run": row.series.run_key, "of_series": row.series.series_id}
    spans = [
        Span(step0=r.step0, step1=r.step1, n=r.n)
        for r in conn.execute(_SPANS, {**find, "first": int(steps[0])})
    ]
    parts = place(spans, steps)
    begins = [spans[part.span].step0 for part in parts if part.span is not None]
    blocks = {}
    others: tuple[float | None, float | None] = (row.min, row.max)
    num_lost = 0
    if begins:
        blocks = {r.step0: Block(**r._mapping) for r in conn.execute(_BLOCKS, {**find, "begins": begins})}
        thinned = [blocks.pop(begin) for begin in list(blocks) if blocks[begin].is_thinned]
        if thinned:
            closed = [block.step0 for block in thinned]
            kept_N = outside(steps, spans, closed)
            steps, values, num_lost = steps[kept_N], values[kept_N], int((~kept_N).sum())
            parts = place(spans, steps, closed=closed)
        if _may_lose_extreme(row, list(blocks.values())):
            others = tuple(conn.execute(_EXTREMES, {**find, "begins": list(blocks)}).one())
    return _Found(
        row=row,
        version=version,
        steps_N=steps,
        values_NW=values,
        parts=parts,
        blocks=blocks,
        spans=spans,
        others=others,
        num_lost=num_lost,
    )


def _arrays(tail: Tail, width: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    steps = np.asarray(tail.steps_N, np.int64)
    with np.errstate(invalid="ignore"):
        values = np.asarray(tail.values_NW, np.float64)
    if values.shape != (len(steps), width):
        raise ValueError(
            f"values of shape {values.shape} for {len(steps)} steps of a series of width {width}"
        )
    return steps, values


def _may_lose_extreme(row: SeriesRow, blocks: Sequence[Block]) -> bool:
    # Only a chunk that is written again and held the series' extreme can take it away (a step written twice).
    return any(block.min == row.min or block.max == row.max for block in blocks if block.min is not None)


def _encode(found: _Found) -> SeriesFlush:
    capacity = chunk_capacity(found.row.series.width)
    added: list[Block] = []
    removed: list[int] = []
    last_values = None
    for part in found.parts:
        steps, values = found.steps_N[part.begin : part.end], found.values_NW[part.begin : part.end]
        if part.span is not None:
            old = found.blocks[found.spans[part.span].step0]
            removed.append(old.step0)
            old_steps, old_values = decode_points(old, found.row.series.width)
            steps, values = last_wins(
                np.concatenate([old_steps, steps]), np.concatenate([old_values, values])
            )
        added.extend(
            encode_points(steps[cut], values[cut]) for cut in split(steps, capacity, shift=part.shift)
        )
        last_values = values[-1]
    after = _statistics(found, added, last_values)
    return SeriesFlush(version=found.version, after=after, removed=tuple(removed), added=tuple(added))


def _statistics(found: _Found, added: Sequence[Block], last_values: NDArray[np.float64] | None) -> SeriesRow:
    row, old = found.row, found.blocks.values()
    last_step = added[-1].step1
    is_last = row.last_step is None or last_step >= row.last_step
    last = row.last
    if is_last and last_values is not None and row.series.kind == "scalar":
        last = None if is_absent(last_values)[0] else float(last_values[0])
    return SeriesRow(
        series=row.series,
        num_points=row.num_points + sum(block.n for block in added) - sum(block.n for block in old),
        first_step=added[0].step0 if row.first_step is None else min(row.first_step, added[0].step0),
        last_step=last_step if is_last else row.last_step,
        last=last,
        min=min((x for x in (found.others[0], *(b.min for b in added)) if x is not None), default=None),
        max=max((x for x in (found.others[1], *(b.max for b in added)) if x is not None), default=None),
        num_nonfinite=row.num_nonfinite
        + sum(block.num_nonfinite for block in added)
        - sum(block.num_nonfinite for block in old),
    )


def commit_flush(
    conn: Connection,
    plan: FlushPlan,
    *,
    folded: Mapping[int, int],
    rule_states: Mapping[RuleKey, Any] | None = None,
    last_steps: Mapping[int, int] | None = None,
    delete_frames: bool = True,
) -> None:
    """Write a plan; `conn` is a write transaction, which the caller may use for more (episodes, exits).

    Args:
        folded: by source id, the sequence number up to which everything is in this plan or an earlier one.
        rule_states: by (rule, key): what the alert rules remember at this offset; None removes one.
        last_steps: by source id, the highest step folded.

    Raises:
        FlushConflict: a series, or a source's offset, is not what the plan saw.
    """
    # Versions first: a conflict must show as one, not as a chunk that is there already.
    _update_series(conn, plan)
    _replace_chunks(conn, plan)
    offsets = [{"of_run": plan.run_key, "of_source": key, "seq": seq} for key, seq in folded.items()]
    if offsets and conn.execute(_FOLDED, offsets).rowcount != len(offsets):
        raise FlushConflict(
            f"a source of run {plan.run_key} cannot move its fold offset to where the plan has it: it is beyond that, "
            "or its log does not reach so far.",
            remedy="Load the run's state again; only one owner may fold a run.",
        )
    if offsets and delete_frames:
        conn.execute(_DELETE_FRAMES, offsets)
    if last_steps:
        conn.execute(
            _LAST_STEP, [{"of_run": plan.run_key, "of_source": k, "step": s} for k, s in last_steps.items()]
        )
    if rule_states:
        save_rule_states(conn, plan.run_key, rule_states)
    if plan.num_lost:
        count_rejected(conn, plan.run_key, plan.num_lost, _LOST)


def _replace_chunks(conn: Connection, plan: FlushPlan) -> None:
    gone: list[dict[str, object]] = []
    new: list[dict[str, object]] = []
    for flush in plan.flushes:
        ids = {"run_id": plan.run_key, "series_id": flush.after.series.series_id}
        gone.extend(
            {"of_run": plan.run_key, "of_series": ids["series_id"], "begin": begin} for begin in flush.removed
        )
        new.extend({**ids, **asdict(block)} for block in flush.added)
    if gone:
        conn.execute(_DELETE_CHUNK, gone)
    if new:
        conn.execute(chunk.insert(), new)


_WRITE_STATISTICS = _UPDATE_SERIES.values(
    version=bindparam("version_"), num_points=bindparam("num_points_"), first_step=bindparam("first_step_"),
    last_step=bindparam("last_step_"), last=bindparam("last_"), min=bindparam("min_"), max=bindparam("max_"),
    num_nonfinite=bindparam("num_nonfinite_"),
)  # fmt: skip


def _update_series(conn: Connection, plan: FlushPlan) -> None:
    rows = [_series_columns(plan.run_key, flush) for flush in plan.flushes]
    if rows and conn.execute(_WRITE_STATISTICS, rows).rowcount != len(rows):
        raise FlushConflict(
            f"a series of run {plan.run_key} changed between plan and commit.",
            remedy="Load the run's state again; only one owner may fold a run.",
        )


def _series_columns(run_key: int, flush: SeriesFlush) -> dict[str, object]:
    after = flush.after
    return {
        "of_run": run_key, "of_series": after.series.series_id, "before": flush.version, "version_": flush.version + 1,
        "num_points_": after.num_points, "first_step_": after.first_step, "last_step_": after.last_step,
        "last_": pack_float(after.last), "min_": pack_float(after.min), "max_": pack_float(after.max),
        "num_nonfinite_": after.num_nonfinite,
    }  # fmt: skip
