"""The few statements that differ between the engines: inserts that know what to do when the row is there.

Statements are built once, at import: building one costs SQLAlchemy more than running it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, Dialect, Table, Text, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.expression import Executable
from sqlalchemy.types import TypeDecorator, TypeEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class PerEngine:
    """One statement in two dialects."""

    sqlite: Executable
    postgresql: Executable

    def on(self, conn: Connection) -> Executable:
        """The statement for the engine of this connection."""
        return self.sqlite if conn.dialect.name == "sqlite" else self.postgresql


class _Keys(TypeDecorator[Collection[int]]):
    """Any number of integers as one parameter: a list of a thousand placeholders takes longer to write than to run."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """JSON text on SQLite, an array on PostgreSQL."""
        kind: TypeEngine[Any] = Text() if dialect.name == "sqlite" else postgresql.ARRAY(BigInteger)
        return dialect.type_descriptor(kind)

    def process_bind_param(self, value: Collection[int] | None, dialect: Dialect) -> Any:
        """The parameter as the driver takes it."""
        keys = list(value or ())
        return json.dumps(keys) if dialect.name == "sqlite" else keys


Among = Callable[[ColumnElement[int]], ColumnElement[bool]]
"""The condition that a column holds one of the integers of parameter `keys`."""


def of_keys(build: Callable[[Among], Executable]) -> PerEngine:
    """A statement about many keys, given as parameter `keys`; `build` makes it with the condition for a column."""
    keys = bindparam("keys", type_=_Keys())
    listed = select(func.json_each(keys).table_valued("value").c.value)
    return PerEngine(
        sqlite=build(lambda column: column.in_(listed)),
        postgresql=build(lambda column: column == func.any(keys)),
    )


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
