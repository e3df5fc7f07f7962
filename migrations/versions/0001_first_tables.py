"""First tables: run, source, schemas, layout, series, frame, chunk, alert, rule state.

A migration never imports the tables of the code: it must build the same database in every later version.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BLOBS = (
    ("source_schema", "data"), ("frame", "data"), ("chunk", "summary"), ("chunk", "steps"), ("chunk", "data"),
)  # fmt: skip


def key(name: str) -> sa.Column:
    return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)


def text_key(name: str) -> sa.Column:
    return sa.Column(name, sa.Text, primary_key=True)


def whole(name: str, *, null: bool = False) -> sa.Column:
    return sa.Column(name, sa.BigInteger, nullable=null)


def text(name: str, *, null: bool = False) -> sa.Column:
    return sa.Column(name, sa.Text, nullable=null)


def real(name: str, *, null: bool = False) -> sa.Column:
    return sa.Column(name, sa.Double, nullable=null)


def blob(name: str, *, null: bool = False) -> sa.Column:
    return sa.Column(name, sa.LargeBinary, nullable=null)


def upgrade() -> None:
    create_runs()
    create_points()
    create_alerts()
    if op.get_bind().dialect.name == "postgresql":
        for table, column in BLOBS:
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")


def create_runs() -> None:
    op.create_table(
        "run", key("run_id"), text("public_id"), text("project"), text("name"), text("config"), text("tags"),
        text("notes"), text("group_name", null=True), text("search"), real("created_s"), real("heartbeat_s"),
        real("updated_s"), real("finished_s", null=True), text("outcome"), text("exit", null=True),
        whole("attempts"), whole("world_size"), text("unavailable"), whole("rejected_records"),
        text("last_rejection", null=True), whole("next_source_id"), whole("next_series_id"), whole("next_layout_id"),
    )  # fmt: skip
    op.create_index("ix_run_created", "run", ["created_s", "run_id"])
    op.create_index("ix_run_project", "run", ["project", "created_s", "run_id"])
    op.create_table(
        "source", key("run_id"), key("source_id"), whole("rank"), whole("attempt"), whole("ordinal"),
        whole("world_size"), whole("local_rank"), text("host"), whole("pid"), real("started_s"), whole("start_step"),
        text("environment"), whole("acked_seq"), whole("folded_seq"), whole("last_step", null=True),
        whole("dropped_reports"), sa.Column("closed", sa.Boolean(create_constraint=False), nullable=False),
        text("exit", null=True), real("exit_s", null=True),
    )  # fmt: skip
    op.create_index("ux_source_writer", "source", ["run_id", "attempt", "rank"], unique=True)
    op.create_table("source_schema", key("run_id"), key("source_id"), key("seq"), blob("data"))


def create_points() -> None:
    op.create_table("layout", key("run_id"), key("layout_id"), text("digest"), text("names"), text("numels"))
    op.create_index("ux_layout_digest", "layout", ["run_id", "digest"], unique=True)
    op.create_table(
        "series", key("run_id"), key("series_id"), whole("attempt"), text("key"), whole("rank", null=True),
        text("kind"), whole("width"), whole("layout_id", null=True), whole("version"), whole("num_points"),
        whole("first_step", null=True), whole("last_step", null=True), blob("last", null=True),
        blob("min", null=True), blob("max", null=True), whole("num_nonfinite"),
    )  # fmt: skip
    op.create_index("ix_series_key", "series", ["run_id", "key", "rank", "attempt"])
    op.create_table("frame", key("run_id"), key("source_id"), key("seq"), blob("data"))
    op.create_table(
        "chunk", key("run_id"), key("series_id"), key("step0"), whole("step1"), whole("n"), whole("stride"),
        text("dtype"), whole("summary_width"), real("min", null=True), real("max", null=True),
        whole("num_nonfinite"), blob("summary"), blob("steps", null=True), blob("data"),
    )  # fmt: skip


def create_alerts() -> None:
    op.create_table(
        "alert", key("run_id"), text_key("alert_id"), whole("attempt"), text("rule"), text("state"),
        text("severity"), real("opened_s"), whole("first_step"), text("episode"),
    )  # fmt: skip
    op.create_index("ix_alert_state", "alert", ["state", "opened_s"])
    op.create_index("ix_alert_opened", "alert", ["opened_s"])
    op.create_table("rule_state", key("run_id"), text_key("rule"), text_key("key"), text("state"))


def downgrade() -> None:
    for table in (
        "rule_state",
        "alert",
        "chunk",
        "frame",
        "series",
        "layout",
        "source_schema",
        "source",
        "run",
    ):
        op.drop_table(table)
