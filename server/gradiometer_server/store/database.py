"""One door to the database: short snapshots to read, one writer at a time, foreign errors translated here.

SQLite is opened in WAL mode with synchronous=FULL (with NORMAL a power cut loses acknowledged frames). Keep reads
short and decode after closing them: under one open read the WAL grows by everything written meanwhile.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, make_url, text

from gradiometer_server.clock import Clock
from gradiometer_server.errors import ConfigurationError, InvalidRequest, StoreUnavailable
from gradiometer_server.store.lockfile import LockFile
from gradiometer_server.store.turns import WriteTurns

logger = logging.getLogger(__name__)

_BUSY_TIMEOUT_S: Final = 10.0
_POOL_SIZE: Final = 8
_CONNECT_TIMEOUT_S: Final = 10
_RETRY_S: Final = 5.0
"""Pause between two writes that only find out whether the database takes any."""
_KEEPALIVE: Final = {
    "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000,
}  # fmt: skip
"""libpq's own are the system's, two hours as a rule: a cut line would hold up every commit for that long."""


def default_database_url() -> str:
    """SQLite below $XDG_DATA_HOME, or ~/.local/share where that is not set."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return URL.create(
        "sqlite", database=str(Path(base) / "gradiometer" / "gradiometer.db")
    ).render_as_string()


def parse_database_url(url: str) -> URL:
    """The URL with the driver that this server uses.

    Raises:
        ConfigurationError: not a URL, an engine other than SQLite and PostgreSQL, or a SQLite URL without a file.
    """
    remedy = "Use sqlite:////absolute/path.db or postgresql://user:password@host/database."
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError) as error:
        raise ConfigurationError("the database URL cannot be read as a URL.", remedy=remedy) from error
    backend = parsed.get_backend_name()
    if backend in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ConfigurationError(f"databases of type {backend!r} are not supported.", remedy=remedy)
    if parsed.database in (None, "", ":memory:"):
        raise ConfigurationError("the SQLite URL names no file.", remedy=remedy)
    return parsed


class Database:
    """Connections to one database. Thread-safe. Opening one touches nothing until the first read or write."""

    def __init__(self, url: str) -> None:
        self.url = parse_database_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.path = Path(str(self.url.database)) if self.is_sqlite else None
        self.name = self.url.render_as_string(hide_password=True)
        self.lock: LockFile | None = None
        self._reader = self._engine(reads=True)
        self._writer = self._engine(reads=False)
        self._turns = WriteTurns()
        self._writing_thread = 0
        self._refused: tuple[StoreUnavailable, float] | None = None

    def _engine(self, *, reads: bool) -> Engine:
        if self.is_sqlite:
            size = _POOL_SIZE if reads else 1
            engine = create_engine(
                self.url, pool_size=size, max_overflow=_POOL_SIZE, connect_args={"timeout": _BUSY_TIMEOUT_S}
            )
            event.listen(engine, "connect", _prepare_sqlite)
            begin = "BEGIN" if reads else "BEGIN IMMEDIATE"
            event.listen(engine, "begin", lambda conn: conn.exec_driver_sql(begin))
            return engine
        return create_engine(
            self.url,
            pool_size=_POOL_SIZE if reads else 1,
            max_overflow=_POOL_SIZE,
            pool_pre_ping=True,
            isolation_level="REPEATABLE READ" if reads else "READ COMMITTED",
            connect_args={"connect_timeout": _CONNECT_TIMEOUT_S, **_KEEPALIVE},
        )

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A short, consistent snapshot.

        Raises:
            StoreUnavailable: the database does not answer.
            InvalidRequest: it was asked for a value that no column can hold, e.g. text with NUL on PostgreSQL.
        """
        try:
            with self.translated("read"), self._reader.connect() as conn, conn.begin():
                yield conn
        except exc.DataError as error:
            raise InvalidRequest(
                f"a value that was asked for is none the database can hold: {_cause(error)}.",
                remedy="Ask for text without NUL, and for numbers below 2**53.",
            ) from error

    @contextmanager
    def write(self, *, urgent: bool = False) -> Iterator[Connection]:
        """A transaction that commits on success; one at a time in this process, never one inside another.

        `urgent`: somebody waits for it; it goes before others that wait (see `WriteTurns`).

        Raises:
            StoreUnavailable: the database refuses; nothing was written.
        """
        me = threading.get_ident()
        if self._writing_thread == me:
            raise RuntimeError(
                "write() inside write() would wait for itself for ever; hand the connection on"
            )
        with self._noted(), self.translated("written"), self._turns.turn(urgent=urgent):
            self._writing_thread = me
            try:
                with self._writer.connect() as conn, conn.begin():
                    yield conn
                self._refused = None
            finally:
                self._writing_thread = 0

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable as error:
            # Also what another part of the server says inside of a transaction; only the database's own words count.
            if error.__cause__ is not None:
                self._refused = error, time.monotonic()
            raise

    def check_writable(self) -> None:
        """Raise the `StoreUnavailable` that the last write ended with, until one succeeds.

        Where nobody writes any more, because the server is not ready, this tries it, at most every `_RETRY_S` seconds.
        """
        refused = self._refused
        if refused is None:
            return
        error, when_s = refused
        if time.monotonic() - when_s < _RETRY_S:
            raise StoreUnavailable(error.message, remedy=error.remedy)
        with self.write() as conn:
            conn.execute(text("UPDATE alembic_version SET version_num = version_num"))

    @contextmanager
    def translated(self, verb: str) -> Iterator[None]:
        """Foreign errors become `StoreUnavailable`: the database cannot be `verb`."""
        try:
            yield
        except (exc.OperationalError, exc.InterfaceError, exc.InternalError, exc.TimeoutError) as error:
            raise self._unavailable(verb, error) from error
        except exc.ProgrammingError as error:
            # Without a statement it was the connection: libpq does not know an option of the URL.
            if error.statement is not None:
                raise
            raise self._unavailable(verb, error) from error
        except exc.DatabaseError as error:
            # Bare sqlite3.DatabaseError: the file is damaged or is no database. Its subclasses are our own mistakes.
            if type(error.orig) is not sqlite3.DatabaseError:
                raise
            raise self._unavailable(verb, error) from error

    def _unavailable(self, verb: str, error: exc.SQLAlchemyError) -> StoreUnavailable:
        cause = _cause(error)
        where = str(self.path) if self.path is not None else self.name
        return StoreUnavailable(f"the database {where} cannot be {verb}: {cause}.", remedy=_remedy(cause))

    def close(self) -> None:
        """Close all connections and let go of the file's lock."""
        self._reader.dispose()
        self._writer.dispose()
        if self.lock is not None:
            self.lock.release()
            self.lock = None


def _cause(error: exc.SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # SQLAlchemy's own BEGIN is replaced by ours, so the driver must not begin anything itself.
    connection.isolation_level = None
    # auto_vacuum only takes effect before the first table, and must come before the switch to WAL.
    for pragma in (
        "auto_vacuum=INCREMENTAL",
        "journal_mode=WAL",
        "synchronous=FULL",
        f"busy_timeout={int(_BUSY_TIMEOUT_S * 1000)}",
        "cache_size=-32768",
        # Some builds overwrite what is deleted with zeros: every folded frame would be written a second time.
        "secure_delete=OFF",
        "journal_size_limit=67108864",
    ):
        connection.execute(f"PRAGMA {pragma}")


_WAITS: Final = "the server tries again by itself."
_REMEDIES: Final = (
    ("disk is full", "Free space on that disk; agents keep their reports and send them again."),
    (
        "No space left",
        "Free space on the database server's disk; agents keep their reports and send them again.",
    ),
    ("locked", "Another program holds the database; end it, or wait."),
    ("readonly", "Make the file and its folder writable for this user."),
    (
        "malformed",
        "The file is damaged: restore it from a backup, or recover it with the sqlite3 shell's .recover.",
    ),
    ("not a database", "Name another file: this one was not made by Gradiometer."),
    ("unable to open", "Check that the folder exists and that this user may write to it."),
    ("connection option", "Correct the options after the ? of the database URL."),
    ("password", "Check user and password in the database URL."),
)


def _remedy(cause: str) -> str:
    for phrase, remedy in _REMEDIES:
        if phrase in cause:
            return remedy
    return f"Check that the database runs and can be reached; {_WAITS}"


def open_database(url: str, *, clock: Clock) -> Database:
    """Open for serving: create the file's folder, take the file's lock, apply migrations.

    Raises:
        ConfigurationError: an unwritable path, a file in use by another server or that is no database, a database
            from a newer version, or a PostgreSQL that cannot be reached.
    """
    # Imported here because migrating needs this module's Database.
    from gradiometer_server.store.migrate import upgrade

    database = Database(url)
    try:
        if database.path is not None:
            make_folder(database.path)
            database.lock = LockFile.take(database.path, now_s=clock.now_s())
        upgrade(database)
    except StoreUnavailable as error:
        database.close()
        remedy = error.remedy.replace(_WAITS, "then start the server again.")
        raise ConfigurationError(error.message, remedy=remedy) from error
    except BaseException:
        database.close()
        raise
    logger.info("database %s is open", database.name)
    return database


def make_folder(path: Path) -> None:
    """Make the folder of a SQLite file; raises `ConfigurationError`, also when the file could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {path.parent} for the database cannot be made: {error.strerror}.",
            remedy="Name a file in a writable folder with GRADIOMETER_DATABASE_URL.",
        ) from error
    if path.is_dir():
        raise ConfigurationError(
            f"the database {path} is a folder.",
            remedy=f"Name a file, for example sqlite:///{path}/gradiometer.db, in GRADIOMETER_DATABASE_URL.",
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(
            f"the database file {path} cannot be written.",
            remedy="Make it writable for this user, or name another file with GRADIOMETER_DATABASE_URL.",
        )
