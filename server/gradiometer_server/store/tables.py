"""The tables, as SQLAlchemy sees them; `migrations/` creates the same (a test compares the two).

Every key begins with `run_id`, there is no sequence and no foreign key across tables: a sharded PostgreSQL can
distribute all of them by run. Floats that may be NaN or infinite are 8-byte little-endian blobs, because SQLite turns
a NaN in a REAL column into NULL; NULL then always means *absent*. Structured values are JSON text (`store/values.py`).

SQLite keeps ordinary rowid tables: `WITHOUT ROWID` puts blobs inside the B-tree, which halves the ingest rate.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, LargeBinary, MetaData, Table, Text

metadata: Final = MetaData()


def _key(name: str) -> Column[int]:
    return Column(name, BigInteger, primary_key=True, autoincrement=False)


def _int(name: str, *, null: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=null)


def _text(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, Text, nullable=null)


def _real(name: str, *, null: bool = False) -> Column[float]:
    """A float that is always finite."""
    return Column(name, Double, nullable=null)


def _blob(name: str, *, null: bool = False) -> Column[bytes]:
    return Column(name, LargeBinary, nullable=null)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean(create_constraint=False), nullable=False)


def _table(name: str, *parts: Any) -> Table:
    return Table(name, metadata, *parts)


run: Final = _table(
    "run", _key("run_id"), _text("public_id"), _text("project"), _text("name"), _text("config"), _text("tags"),
    _text("notes"), _text("group_name", null=True), _text("search"), _real("created_s"), _real("heartbeat_s"),
    _real("updated_s"), _real("finished_s", null=True), _text("outcome"), _text("exit", null=True), _int("attempts"),
    _int("world_size"), _text("unavailable"), _int("rejected_records"), _text("last_rejection", null=True),
    _int("next_source_id"), _int("next_series_id"), _int("next_layout_id"), _text("edited", null=True),
    _real("thinned_s", null=True),
    Index("ix_run_created", "created_s", "run_id"),
    Index("ix_run_project", "project", "created_s", "run_id"),
)  # fmt: skip
"""`outcome` is open, finished, failed or crashed: of the latest attempt. Running or lost follows from the heartbeat.
`edited`: what people changed, and what of the agents' words that replaced. `thinned_s`: when its raw points were dropped.
"""

deleted_run: Final = _table(
    "deleted_run", _key("run_id"), _text("public_id"), _text("project"), _real("deleted_s"),
    _int("last_launch"), _flag("is_purged"),
)  # fmt: skip
"""Runs that somebody deleted. Launches (Unix ms) up to `last_launch` are refused; `is_purged`: nothing of them is left in any other table."""

metric_definition: Final = _table(
    "metric_definition", _key("run_id"), Column("name", Text, primary_key=True), _text("summary"),
    _text("goal", null=True), _text("step_metric", null=True),
)  # fmt: skip
"""How a metric, or all whose names match a pattern, is summarised: as `run.define_metric` said."""

source: Final = _table(
    "source", _key("run_id"), _key("source_id"), _int("rank"), _int("attempt"), _int("ordinal"), _int("world_size"),
    _int("local_rank"), _text("host"), _int("pid"), _real("started_s"), _int("start_step"), _text("environment"),
    _int("acked_seq"), _int("folded_seq"), _int("last_step", null=True), _int("dropped_reports"), _flag("closed"),
    _text("exit", null=True), _real("exit_s", null=True),
    Index("ux_source_writer", "run_id", "attempt", "rank", unique=True),
)  # fmt: skip

source_schema: Final = _table("source_schema", _key("run_id"), _key("source_id"), _key("seq"), _blob("data"))
"""Schema records, kept when their frames are folded away: later frames of the source need them."""

layout: Final = _table(
    "layout", _key("run_id"), _key("layout_id"), _text("digest"), _text("names"), _text("numels"),
    Index("ux_layout_digest", "run_id", "digest", unique=True),
)  # fmt: skip

series: Final = _table(
    "series", _key("run_id"), _key("series_id"), _int("attempt"), _text("key"), _int("rank", null=True),
    _text("kind"), _int("width"), _int("layout_id", null=True), _int("version"), _int("num_points"),
    _int("first_step", null=True), _int("last_step", null=True), _blob("last", null=True), _blob("min", null=True),
    _blob("max", null=True), _int("num_nonfinite"),
    Index("ix_series_key", "run_id", "key", "rank", "attempt"),
)  # fmt: skip
"""`version` counts the flushes that changed the series' chunks: what the optimistic check of a flush compares."""

frame: Final = _table("frame", _key("run_id"), _key("source_id"), _key("seq"), _blob("data"))

chunk: Final = _table(
    "chunk", _key("run_id"), _key("series_id"), _key("step0"), _int("step1"), _int("n"), _int("stride"),
    _text("dtype"), _int("summary_width"), _real("min", null=True), _real("max", null=True), _int("num_nonfinite"),
    _blob("summary"), _blob("steps", null=True), _blob("data"),
)  # fmt: skip
"""The blobs come last and `data` very last: SQLite then reads the others without the data's overflow pages. An empty
`data`: the points were dropped to save space, the summary stays."""

alert: Final = _table(
    "alert", _key("run_id"), Column("alert_id", Text, primary_key=True), _int("attempt"), _text("rule"), _text("state"),
    _text("severity"), _real("opened_s"), _int("first_step"), _text("episode"),
    Index("ix_alert_state", "state", "opened_s"),
    Index("ix_alert_opened", "opened_s"),
)  # fmt: skip

rule_state: Final = _table(
    "rule_state", _key("run_id"), Column("rule", Text, primary_key=True), Column("key", Text, primary_key=True),
    _text("state"),
)  # fmt: skip

detail: Final = _table(
    "detail", _key("run_id"), _key("source_id"), _key("seq"), _text("kind"), _text("reason"),
    _int("trigger_step", null=True), _int("schema_id"), _int("step0"), _int("step1"), _int("n"), _int("width"),
    _int("num_bytes"), _blob("steps"), _blob("times"), _blob("data"),
)  # fmt: skip
"""Layer statistics of one rank alone, by the record that brought them; `num_bytes` of values before compression."""

dump: Final = _table(
    "dump", _key("run_id"), _key("source_id"), _key("step"), _int("rank"), _text("host"), _text("path"), _text("reason"),
    _int("num_bytes"), _real("saved_s"),
)  # fmt: skip
"""Where a flight recorder saved a step. The files stay there."""

BLOBS: Final = (
    ("source_schema", "data"), ("frame", "data"), ("chunk", "summary"), ("chunk", "steps"), ("chunk", "data"),
    ("detail", "data"),
)  # fmt: skip
"""PostgreSQL keeps these uncompressed and out of line: they are compressed already, and a summary is then read
without touching the data beside it."""
