"""`gradiometer serve | db | lint` (`python -m gradiometer_server`): the server's command line.

What a person can put right is one line on standard error and exit code 2; never a traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from gradiometer_server.errors import GradiometerError
from gradiometer_server.lint.command import add_lint
from gradiometer_server.settings import DEFAULT_HOST, DEFAULT_PORT, settings_from
from gradiometer_server.store.database import default_database_url

EXIT_USAGE = 2
EXIT_BROKEN_PIPE = 141
"""What a shell reports of a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.WARNING if options.quiet else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for name in ("alembic", "uvicorn"):
        # Their INFO is about themselves: one line per plugin, per connection, per look at the revision.
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        code: int = options.run(options)
        # Here, where a reader that has gone (`gradiometer db stats | head -1`) can still be told from an error.
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except GradiometerError as error:
        print(f"gradiometer: {error}", file=sys.stderr)
        return EXIT_USAGE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradiometer", description="Gradiometer's server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="run the server"))
    _add_db(commands.add_parser("db", help="look after the database"))
    add_lint(commands.add_parser("lint", help="what the alert rules say of training logs"))
    return parser


def _add_db(db: argparse.ArgumentParser) -> None:
    commands = db.add_subparsers(required=True, metavar="COMMAND")
    helps = {
        "stats": "print figures",
        "check": "look for damage; exit code 1 if there is any",
        "backup": "copy a SQLite database, also while a server runs",
        "export": "write one run to a folder that can be read without Gradiometer",
        "vacuum": "give space that deleting has freed back to the disk, also while a server runs",
        "upgrade": "bring the tables to this version's revision; a server does so at its start",
        "downgrade": "take the tables back; data that only newer tables hold is lost",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text)
        _add_database(command)
        command.set_defaults(run=_db, command=name)
        if name == "backup":
            command.add_argument("path", metavar="PATH", help="file to write; it must not exist")
        elif name == "export":
            _add_export(command)
        elif name == "vacuum":
            full = "write everything anew, for files that cannot shrink otherwise; holds everybody up"
            command.add_argument("--full", action="store_true", help=full)
        elif name == "upgrade":
            command.add_argument("revision", nargs="?", default="head")
        elif name == "downgrade":
            command.add_argument("revision", help="a revision, or `base` for no tables")
            yes = "with `base`: yes, remove every table with everything in it"
            command.add_argument("--yes", action="store_true", help=yes)


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_id", metavar="RUN", help="run id")
    command.add_argument("path", metavar="FOLDER", help="folder to make; it must not exist")
    command.add_argument(
        "--format", choices=("jsonl", "csv"), default="jsonl", help="how points are written (jsonl)"
    )


def _db(options: argparse.Namespace) -> int:
    from gradiometer_server import maintain

    options.database = _database_url(options)
    code: int = getattr(maintain, options.command)(options)
    return code


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--host", help=f"address to listen on (GRADIOMETER_HOST; {DEFAULT_HOST})")
    serve.add_argument("--port", type=int, help=f"port, 0: any free one (GRADIOMETER_PORT; {DEFAULT_PORT})")
    serve.add_argument("--token-file", help="file that holds the token (or set GRADIOMETER_TOKEN)")
    serve.add_argument(
        "--path-prefix", help="path under which a reverse proxy publishes the server, e.g. /gradiometer"
    )
    serve.add_argument(
        "--until-stdin-ends",
        action="store_true",
        help="stop when standard input is closed: for a program that starts a server of its own",
    )
    _add_database(serve)
    serve.set_defaults(run=_serve)


def _add_database(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--database", metavar="URL", help="GRADIOMETER_DATABASE_URL; a SQLite file by default"
    )
    parser.add_argument("--quiet", action="store_true", help="log only warnings and errors")


def _database_url(options: argparse.Namespace) -> str:
    return options.database or os.environ.get("GRADIOMETER_DATABASE_URL") or default_database_url()


def _serve(options: argparse.Namespace) -> int:
    # Imported here, so that a usage error and `db` commands need no web framework.
    from gradiometer_server.serving import serve

    settings = settings_from(
        os.environ,
        database_url=_database_url(options),
        host=options.host,
        port=options.port,
        token_file=options.token_file,
        path_prefix=options.path_prefix,
    )
    return serve(settings, until_stdin_ends=options.until_stdin_ends)
