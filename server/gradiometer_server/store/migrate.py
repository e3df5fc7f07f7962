"""Applies the Alembic migrations at start, in one transaction, and refuses a database from a newer version."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

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
        if found != ScriptDirectory.from_config(config).get_current_head() or revision != "head":
            command.upgrade(config, revision)
            logger.info("database migrated from %s to %s", found, revision)


def downgrade(database: Database, revision: str) -> None:
    """Take the database back to `revision` ("base": no tables). Data that only newer tables hold is lost."""
    with database.write() as conn:
        command.downgrade(alembic_config(conn), revision)


def _refuse_newer(database: Database, config: Config, found: str | None) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        where = database.path if database.path is not None else database.name
        raise ConfigurationError(
            f"the database {where} is at revision {found}, which this version does not know: a newer one made it.",
            remedy=f"Upgrade gradiometer (this is {gradiometer_server.__version__}), or use another database.",
        )
