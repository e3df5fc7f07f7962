"""Layer statistics of single ranks, shipped when something went wrong."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def key(name: str) -> sa.Column:
    return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)


def whole(name: str, *, null: bool = False) -> sa.Column:
    return sa.Column(name, sa.BigInteger, nullable=null)


def text(name: str) -> sa.Column:
    return sa.Column(name, sa.Text, nullable=False)


def blob(name: str) -> sa.Column:
    return sa.Column(name, sa.LargeBinary, nullable=False)


def upgrade() -> None:
    op.create_table(
        "detail", key("run_id"), key("source_id"), key("seq"), text("kind"), text("reason"),
        whole("trigger_step", null=True), whole("schema_id"), whole("step0"), whole("step1"), whole("n"),
        whole("width"), whole("num_bytes"), blob("steps"), blob("times"), blob("data"),
    )  # fmt: skip
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE detail ALTER COLUMN data SET STORAGE EXTERNAL")


def downgrade() -> None:
    op.drop_table("detail")
