"""Alembic's entry: runs the migrations on the connection that the server hands over, in its transaction.

From a shell (`alembic -c migrations/alembic.ini upgrade head`) it opens GRADIOMETER_DATABASE_URL itself.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from gradiometer_server.store.database import Database, default_database_url
from gradiometer_server.store.tables import metadata


def migrate(connection: Connection) -> None:
    # One transaction for all of it, on SQLite too: a failed migration leaves the database as it was.
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


handed_over = context.config.attributes.get("connection")
if handed_over is not None:
    migrate(handed_over)
else:
    database = Database(os.environ.get("GRADIOMETER_DATABASE_URL") or default_database_url())
    with database.write() as opened:
        migrate(opened)
    database.close()
