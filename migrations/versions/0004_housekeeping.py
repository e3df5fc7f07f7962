"""Edits of runs, deleted runs, thinned runs, and how metrics are to be summarised."""

from __future__ import annotations

import struct

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def text(name: str, *, null: bool = False) -> sa.Column:
    return sa.Column(name, sa.Text, nullable=null)


def key(name: str) -> sa.Column:
    return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)


def upgrade() -> None:
    op.add_column("run", text("edited", null=True))
    op.add_column("run", sa.Column("thinned_s", sa.Double, nullable=True))
    op.create_table(
        "deleted_run", key("run_id"), text("public_id"), text("project"),
        sa.Column("deleted_s", sa.Double, nullable=False),
        sa.Column("last_launch", sa.BigInteger, nullable=False),
        sa.Column("is_purged", sa.Boolean(create_constraint=False), nullable=False),
    )  # fmt: skip
    op.create_table(
        "metric_definition", key("run_id"), sa.Column("name", sa.Text, primary_key=True), text("summary"),
        text("goal", null=True), text("step_metric", null=True),
    )  # fmt: skip


def downgrade() -> None:
    drop_thinned()
    op.drop_table("metric_definition")
    op.drop_table("deleted_run")
    op.drop_column("run", "thinned_s")
    op.drop_column("run", "edited")


def drop_thinned() -> None:
    """Chunks without values cannot be read by what knows only revision 0003: they go, and the series say so."""
    conn = op.get_bind()
    # Not by run.thinned_s, which is only set once all of a run is thinned.
    found = conn.execute(sa.text("SELECT DISTINCT run_id FROM chunk WHERE length(data) = 0"))
    runs = found.scalars().all()
    for run_id in runs:
        conn.execute(sa.text("DELETE FROM chunk WHERE run_id = :run AND length(data) = 0"), {"run": run_id})
        rows = (
            conn.execute(sa.text("SELECT series_id FROM series WHERE run_id = :run"), {"run": run_id})
            .scalars()
            .all()
        )
        for series_id in rows:
            recount(conn, {"run": run_id, "series": series_id})


def recount(conn: sa.Connection, place: dict[str, int]) -> None:
    found = conn.execute(
        sa.text(
            "SELECT coalesce(sum(n), 0) AS num_points, min(step0) AS first_step, max(step1) AS last_step, "
            "min(min) AS low, max(max) AS high, coalesce(sum(num_nonfinite), 0) AS num_nonfinite "
            "FROM chunk WHERE run_id = :run AND series_id = :series"
        ),
        place,
    ).one()
    conn.execute(
        sa.text(
            "UPDATE series SET num_points = :n, first_step = :first, last_step = :last, min = :low, max = :high, "
            "num_nonfinite = :bad WHERE run_id = :run AND series_id = :series"
        ),
        {
            **place, "n": int(found.num_points), "first": found.first_step, "last": found.last_step,
            "low": packed(found.low), "high": packed(found.high), "bad": int(found.num_nonfinite),
        },
    )  # fmt: skip
    if not found.num_points:
        conn.execute(
            sa.text("UPDATE series SET last = NULL WHERE run_id = :run AND series_id = :series"), place
        )


def packed(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("<d", value)
