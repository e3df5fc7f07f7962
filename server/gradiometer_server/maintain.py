"""`db stats | check | backup | export | vacuum | upgrade | downgrade`: looking after a database from the command line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from gradiometer_server.clock import SystemClock
from gradiometer_server.errors import ConfigurationError
from gradiometer_server.store import maintenance, migrate
from gradiometer_server.store.database import Database, make_folder
from gradiometer_server.store.export import export_run
from gradiometer_server.store.lockfile import LockFile

EXIT_FINDINGS = 1


def stats(options: argparse.Namespace) -> int:
    """Print figures of the database."""
    with _open(options.database) as database:
        for name, value in dataclasses.asdict(maintenance.stats(database)).items():
            print(f"{name:14} {value}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Print everything that is wrong; exit code 1 if there is anything."""
    num_problems = 0
    with _open(options.database) as database:
        for problem in maintenance.check(database):
            num_problems += 1
            print(f"{problem.where}: {problem.what}")
    print(f"{num_problems} problems found" if num_problems else "no problem found")
    return EXIT_FINDINGS if num_problems else 0


def backup(options: argparse.Namespace) -> int:
    """Copy a SQLite database, also while a server runs."""
    with _open(options.database, current=False) as database:
        maintenance.backup(database, Path(options.path))
    print(f"backup written to {options.path}")
    return 0


def vacuum(options: argparse.Namespace) -> int:
    """Give freed space back to the disk."""
    with _open(options.database, alone=options.full) as database:
        freed_bytes = maintenance.vacuum(database, full=options.full)
    print(
        f"the files are {freed_bytes} bytes smaller" if freed_bytes > 0 else "there was nothing to give back"
    )
    return 0


def export(options: argparse.Namespace) -> int:
    """Write one run to a folder that can be read without Gradiometer."""
    with _open(options.database) as database:
        counts = export_run(
            database, options.run_id, Path(options.path), table=options.format, now_s=SystemClock().now_s()
        )
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    print(f"run {options.run_id} is in {options.path}: {told or 'nothing was recorded'}")
    return 0


def upgrade(options: argparse.Namespace) -> int:
    """Bring the tables to this version's revision, or to a named one."""
    with _open(options.database, alone=True, may_be_new=True) as database:
        migrate.upgrade(database, options.revision)
        _print_revision(database)
    return 0


def downgrade(options: argparse.Namespace) -> int:
    """Take the tables back to a revision; to none at all only with `--yes`."""
    with _open(options.database, alone=True, current=False) as database:
        migrate.downgrade(database, options.revision, may_empty=options.yes)
        _print_revision(database)
    return 0


def _print_revision(database: Database) -> None:
    with database.read() as conn:
        print(f"the database is at revision {migrate.current_revision(conn) or 'base (no tables)'}")


@contextlib.contextmanager
def _open(
    url: str, *, alone: bool = False, may_be_new: bool = False, current: bool = True
) -> Iterator[Database]:
    """The database as it is. `alone`: not while a server uses the SQLite file; `current`: it must be migrated."""
    database = Database(url)
    try:
        if database.path is not None and not (may_be_new or database.path.is_file()):
            raise ConfigurationError(
                f"there is no database {database.path}.",
                remedy="Name it with --database or GRADIOMETER_DATABASE_URL.",
            )
        if alone and database.path is not None:
            make_folder(database.path)
            database.lock = LockFile.take(database.path, now_s=SystemClock().now_s())
        if not may_be_new:
            migrate.require_tables(database, current=current)
        yield database
    finally:
        database.close()
