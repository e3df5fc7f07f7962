"""Where flight recorders saved steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def key(name: str) -> sa.Column:
    return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)


def upgrade() -> None:
    op.create_table(
        "dump",
        key("run_id"),
        key("source_id"),
        key("step"),
        sa.Column("rank", sa.BigInteger, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("saved_s", sa.Double, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("dump")
