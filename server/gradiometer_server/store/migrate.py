"""Applies the Alembic migrations at start, in one transaction, and refuses a database from a newer version."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, inspect, text

import gradiometer_server
from gradiometer_server.errors import ConfigurationError
from gradiometer_server.store.database import Database

logger = logging.getLogger(__name__)

_ADVISORY_LOCK: Final = 0x6752_4164
"""Two servers that start on one PostgreSQL migrate one after the other."""


def migrations_folder() -> Path:
    """Where the migrations are: in the installed package, or in the repository."""
    package = Path(gradiometer_server.__file__).parent
    for folder in (package / "_migrations", package.parent.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationError(
        f"the migrations are missing beside {package}.", remedy="Install gradiometer[server] again."
    )


def alembic_config(conn: Connection) -> Config:
    """Alembic's settings for one run on an open connection."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = conn
    return config


def current_revision(conn: Connection) -> str | None:
    """The revision that the database is at; None when it is empty."""
    return MigrationContext.configure(conn).get_current_revision()


def upgrade(database: Database, revision: str = "head") -> None:
    """Bring the database to `revision`. Raises `ConfigurationError`, `StoreUnavailable`."""
    with database.write() as conn:
        if not database.is_sqlite:
            conn.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
        config = alembic_config(conn)
        found = current_revision(conn)
        _refuse_newer(database, config, found)
        _refuse_foreign(database, conn, found)
        if found != ScriptDirectory.from_config(config).get_current_head() or revision != "head":
            with _told(revision):
                command.upgrade(config, revision)
            logger.info("database migrated from %s to %s", found, revision)


def downgrade(database: Database, revision: str, *, may_empty: bool = True) -> None:
    """Take the database back to `revision` ("base": no tables). Data that only newer tables hold is lost.

    Raises:
        ConfigurationError: there is no such revision, the database is from a newer version, which alone can do it, or no
            table would be left and `may_empty` is not set. Nothing was changed.
        StoreUnavailable: nothing was changed.
    """
    with database.write() as conn:
        config = alembic_config(conn)
        _refuse_newer(database, config, current_revision(conn))
        if revision == "base" and not may_empty:
            raise _would_empty(database)
        with _told(revision):
            command.downgrade(config, revision)
        # A number of steps back may lead there as well; what is raised here takes everything back.
        if current_revision(conn) is None and not may_empty:
            raise _would_empty(database)


def _would_empty(database: Database) -> ConfigurationError:
    return ConfigurationError(
        f"this removes every table of {_place(database)}, with all runs in them. Nothing was changed.",
        remedy="If you want that, say so with --yes, after `gradiometer db backup`.",
    )


def require_tables(database: Database, *, current: bool) -> None:
    """Refuse a database without tables or from a newer version; `current`: also one that is not migrated yet.

    Raises:
        ConfigurationError, StoreUnavailable.
    """
    with database.read() as conn:
        found = current_revision(conn)
        config = alembic_config(conn)
    _refuse_newer(database, config, found)
    if found is None:
        raise ConfigurationError(
            f"the database {_place(database)} holds no tables of Gradiometer.",
            remedy="Name the one that the server uses; a server makes its tables at its first start.",
        )
    head = ScriptDirectory.from_config(config).get_current_head()
    if current and found != head:
        raise ConfigurationError(
            f"the database {_place(database)} is at revision {found}; this version needs {head}.",
            remedy="Start the server once, or run `gradiometer db upgrade`, after a backup.",
        )


@contextlib.contextmanager
def _told(revision: str) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise ConfigurationError(
            f"the database cannot be taken to revision {revision!r}: {error}.",
            remedy="Name a revision of this version's migrations, `head` or `base`.",
        ) from error


def _refuse_foreign(database: Database, conn: Connection, found: str | None) -> None:
    # On PostgreSQL sharing a schema is the administrator's decision; a SQLite file belongs to one program.
    if found is not None or not database.is_sqlite:
        return
    others = set(inspect(conn).get_table_names()) - {"alembic_version"}
    if others:
        raise ConfigurationError(
            f"the file {database.path} belongs to another program: it holds the table {min(others)!r}.",
            remedy="Name another file with GRADIOMETER_DATABASE_URL.",
        )


def _place(database: Database) -> str:
    return str(database.path) if database.path is not None else database.name


def _refuse_newer(database: Database, config: Config, found: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise ConfigurationError(
            f"the database {_place(database)} is at revision {found}, which this version does not know: a newer one made it.",
            remedy=f"Upgrade gradiometer (this is {gradiometer_server.__version__}), or use another database.",
        )
