"""The command `gradiometer`: `sync`, `demo` and `replay` here, everything else handed to the server's own command line."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gradiometer import __version__

EXIT_BROKEN_PIPE: Final = 141
"""What a shell shows for a program that ends by SIGPIPE: nobody reads its output any more."""
SERVER_COMMANDS: Final = ("serve", "db", "lint")

_HELP: Final = """\
usage: gradiometer COMMAND [options]

The instrument panel and flight recorder for PyTorch training runs.

commands:
  serve   start the server and its dashboard
  demo    train a small model and watch it live
  replay  run a step that the flight recorder saved again, and name the operation that went non-finite
  sync    deliver runs that are waiting in a spool on this machine
  db      the server's database: figures, check, backup, export, vacuum, migrations
  lint    what the alert rules say of training logs: CSV, JSON Lines, trainer_state.json

  gradiometer COMMAND --help    options of one command
  gradiometer --version

environment:
  GRADIOMETER_URL      the server (default http://127.0.0.1:7717)
  GRADIOMETER_TOKEN    its token, where it asks for one
  GRADIOMETER_SPOOL    where runs wait until the server has them
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        code = _main(argv)
        # Here, where a reader that has gone (`gradiometer demo | head -1`) can still be told from an error.
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        sys.stderr.write(_HELP)
        return 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if command in ("-V", "--version"):
        print(f"gradiometer {__version__}")
        return 0
    if command == "sync":
        return _sync(rest)
    if command == "demo":
        return _demo(rest)
    if command == "replay":
        from gradiometer import replay

        return replay.main(rest)
    if command in SERVER_COMMANDS:
        return _server(arguments)
    sys.stderr.write(f"gradiometer: there is no command {command!r}.\n\n{_HELP}")
    return 2


def _sync(argv: list[str]) -> int:
    # Here, because the other commands need no WebSocket client.
    from gradiometer import spool
    from gradiometer.address import DEFAULT_URL
    from gradiometer.credentials import token_from_environment
    from gradiometer.uplink.sync import sync

    parser = argparse.ArgumentParser(
        prog="gradiometer sync",
        description="Deliver every run that waits in a spool; exit code 1 if one could not be.",
    )
    parser.add_argument(
        "path", nargs="?", type=Path, help="a spool, or the folder of one run or attempt in it"
    )
    parser.add_argument("--url", default=os.environ.get("GRADIOMETER_URL") or DEFAULT_URL, help="the server")
    parser.add_argument(
        "--patience",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds without progress before giving up (10)",
    )
    arguments = parser.parse_args(argv)
    path = arguments.path or spool.default_root()
    if arguments.path is not None and not arguments.path.is_dir():
        # A path that was mistyped must not look like a spool in which nothing waits.
        sys.stderr.write(
            f"gradiometer sync: {path} is no folder: name a spool, or the folder of one run or attempt in it.\n"
        )
        return 1
    try:
        token = token_from_environment()
    except ValueError as error:
        sys.stderr.write(f"gradiometer sync: {error}\n")
        return 1
    return sync(path, url=arguments.url, token=token, patience_s=arguments.patience)


def _demo(argv: list[str]) -> int:
    # Here, because the demo imports torch.
    from gradiometer import demo

    return int(demo.main(argv) or 0)


def _server(arguments: list[str]) -> int:  # noqa: RET503
    missing = [name for name in ("fastapi", "gradiometer_server") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"gradiometer: {arguments[0]!r} needs the server, and {missing[0]} is not installed. "
            'Run: pip install "gradiometer[server]"\n'
        )
        return 1
    # Another process, so that the agent never imports the server.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "gradiometer_server", *arguments])  # noqa: S606
