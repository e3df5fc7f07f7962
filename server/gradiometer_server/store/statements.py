"""The few statements that differ between the engines: inserts that know what to do when the row is there.

Statements are built once, at import: building one costs SQLAlchemy more than running it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.expression import Executable


@dataclass(frozen=True, slots=True, kw_only=True)
class PerEngine:
    """One statement in two dialects."""

    sqlite: Executable
    postgresql: Executable

    def on(self, conn: Connection) -> Executable:
        """The statement for the engine of this connection."""
        return self.sqlite if conn.dialect.name == "sqlite" else self.postgresql


def insert_or_ignore(table: Table) -> PerEngine:
    """INSERT that leaves an existing row of the same primary key alone."""
    keys = [column.name for column in table.primary_key]
    return PerEngine(
        sqlite=sqlite.insert(table).on_conflict_do_nothing(index_elements=keys),
        postgresql=postgresql.insert(table).on_conflict_do_nothing(index_elements=keys),
    )


def insert_or_update(table: Table, updated: Iterable[str]) -> PerEngine:
    """INSERT that sets the `updated` columns when a row of the same primary key exists."""
    keys, names = [column.name for column in table.primary_key], tuple(updated)

    def build(insert: Any) -> Executable:
        statement = insert(table)
        values = {name: statement.excluded[name] for name in names}
        built: Executable = statement.on_conflict_do_update(index_elements=keys, set_=values)
        return built

    return PerEngine(sqlite=build(sqlite.insert), postgresql=build(postgresql.insert))
