"""The command `gradiometer lint`: reads files, judges them and says how it went by its exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from gradiometer_server.lint.judge import judge
from gradiometer_server.lint.objects import read_lines, read_trainer_state
from gradiometer_server.lint.report import FORMATS, Report, alarms
from gradiometer_server.lint.rows import Row, UnreadableLog
from gradiometer_server.lint.tables import read_table

EXIT_FOUND: Final = 1
EXIT_UNREADABLE: Final = 2
_READERS: Final[dict[str, Callable[..., Iterator[Row]]]] = {
    ".csv": read_table,
    ".tsv": read_table,
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".json": read_trainer_state,
}


def add_lint(command: argparse.ArgumentParser) -> None:
    """Give `command` its arguments."""
    command.description = (
        "What the alert rules would have said of training logs. Exit code 0: nothing at warning or above; "
        "1: something; 2: a file could not be read."
    )
    command.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        type=Path,
        help="a CSV file, a file of one JSON object per line, a trainer_state.json, or a folder of such files",
    )
    command.add_argument("--format", choices=tuple(FORMATS), default="table", help="how to print (table)")
    command.add_argument(
        "--step", metavar="NAME", help="column or key that holds the step (found by its name)"
    )
    command.set_defaults(run=lint, quiet=True)


def lint(options: argparse.Namespace) -> int:
    """Judge every file; one that cannot be read is named on standard error and does not stop the others."""
    reports: list[Report] = []
    unreadable = False
    for path in _files(options.paths):
        try:
            rows = _reader(path)(path, step_column=options.step)
            reports.append(Report(name=path.stem, judgement=judge(rows)))
        except UnreadableLog as error:
            unreadable = True
            sys.stderr.write(f"gradiometer lint: {error}\n")
    sys.stdout.write(FORMATS[options.format](reports))
    if unreadable:
        return EXIT_UNREADABLE
    return EXIT_FOUND if any(alarms(report) for report in reports) else 0


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(inner for inner in path.iterdir() if inner.suffix.lower() in _READERS)
        else:
            yield path


def _reader(path: Path) -> Callable[..., Iterator[Row]]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        kinds = ", ".join(f"*{suffix}" for suffix in _READERS)
        raise UnreadableLog(path, f"is not a kind of file that can be read ({kinds})")
    return reader
