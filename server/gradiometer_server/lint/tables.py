"""Reads training logs that are tables: CSV, with commas, semicolons or tabs."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gradiometer_server.lint.names import STEP_NAMES, metric_names, step_name
from gradiometer_server.lint.rows import MAX_METRICS, Row, UnreadableLog, number, shown, whole_step

_DELIMITERS: Final = ",\t;"
_MAX_HEADER_CHARS: Final = 1_000_000


def read_table(path: Path, *, step_column: str | None = None) -> Iterator[Row]:
    """Rows of a CSV file, one at a time.

    Raises:
        UnreadableLog: no step column, a cell that is no number in a column of numbers, more cells than columns, ...
    """
    with told_apart(path), path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline(_MAX_HEADER_CHARS)
        if not header.strip():
            raise UnreadableLog(path, "is empty" if not header else "has no header", line=1)
        delimiter = max(_DELIMITERS, key=header.count)
        names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter))]
        table = _Table(path, names, step_column)
        reader = csv.reader(file, delimiter=delimiter)
        try:
            for cells in reader:
                row = table.row(cells, reader.line_num + 1)
                if row is not None:
                    yield row
        except csv.Error as error:
            raise UnreadableLog(path, f"is not CSV: {error}", line=reader.line_num + 1) from None


@contextmanager
def told_apart(path: Path) -> Iterator[None]:
    """Names the file in what opening and decoding it can raise."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise UnreadableLog(path, f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise UnreadableLog(path, (error.strerror or str(error)).lower()) from None


class _Table:
    """Knows the columns of one file, and which of them hold numbers: that shows at their first value."""

    def __init__(self, path: Path, names: Sequence[str], step_column: str | None) -> None:
        self._path, self._names = path, names
        if len(names) > MAX_METRICS:
            raise UnreadableLog(
                path, f"has {len(names):,} columns; at most {MAX_METRICS:,} can be read", line=1
            )
        self._step = self._step_index(step_column)
        if {"metric", "value"} <= {name.lower() for name in names}:
            raise UnreadableLog(
                path,
                "has one value per row, with the name of its metric beside it",
                line=1,
                remedy="Write one row per step, with a column for each metric.",
            )
        metrics = metric_names([name if index != self._step else "step" for index, name in enumerate(names)])
        self._metrics = [
            (index, metric) for index, metric in enumerate(metrics) if metric and index != self._step
        ]
        self._numeric: dict[int, bool] = {}

    def _step_index(self, step_column: str | None) -> int:
        if step_column is not None and step_column not in self._names:
            found = ", ".join(map(shown, self._names[:20]))
            raise UnreadableLog(self._path, f"has no column {shown(step_column)}; it has {found}", line=1)
        name = step_column or step_name(self._names)
        if name is None:
            raise UnreadableLog(
                self._path,
                f"has no column that holds the step (one of {', '.join(STEP_NAMES)})",
                line=1,
                remedy="Name it with --step COLUMN.",
            )
        return self._names.index(name.strip())

    def row(self, cells: Sequence[str], line: int) -> Row | None:
        """The row that `cells` hold; None: it has no value at all."""
        if len(cells) > len(self._names):
            raise UnreadableLog(
                self._path, f"has {len(cells)} cells, but the header has {len(self._names)}", line=line
            )
        values = {
            metric: value
            for index, metric in self._metrics
            if index < len(cells) and (value := self._value(index, cells[index], line)) is not None
        }
        if not values:
            return None
        text = cells[self._step] if self._step < len(cells) else ""
        try:
            step = number(text)
            if step is None:
                raise ValueError("is empty")
            return Row(step=whole_step(step), values=values, line=line)
        except ValueError:
            raise UnreadableLog(
                self._path,
                f"the step is {shown(text)}, not a whole number",
                line=line,
                column=self._names[self._step],
            ) from None

    def _value(self, index: int, text: str, line: int) -> float | None:
        # Hot path: one look-up and one conversion for a cell of a column of numbers.
        numeric = self._numeric.get(index)
        if numeric is False:
            return None
        try:
            value = number(text)
        except ValueError:
            if numeric is None:
                self._numeric[index] = False  # A column of text, such as a date or a name.
                return None
            raise UnreadableLog(
                self._path,
                f"{shown(text)} is no number, as the cells above it are",
                line=line,
                column=self._names[index],
            ) from None
        if value is not None:
            self._numeric[index] = True
        return value
