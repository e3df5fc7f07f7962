"""Reads training logs that are JSON: one object per line, or the `trainer_state.json` of Hugging Face's Trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gradiometer_server.lint.names import STEP_NAMES, metric_names, step_name
from gradiometer_server.lint.rows import MAX_METRICS, Row, UnreadableLog, number, shown, whole_step
from gradiometer_server.lint.tables import told_apart

_MAX_DEPTH: Final = 8
_WORDS: Final = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "-infinity", "+infinity"})
_MAX_LINE_CHARS: Final = 10_000_000


def read_lines(path: Path, *, step_column: str | None = None) -> Iterator[Row]:
    """Rows of a file with one JSON object per line, one at a time; objects inside become `outer/inner`.

    Raises:
        UnreadableLog: a line that is no object, or has values but no step.
    """
    with told_apart(path), path.open(encoding="utf-8-sig") as file:
        number_of = 0
        while line := file.readline(_MAX_LINE_CHARS):
            number_of += 1
            if not line.strip():
                continue
            row = _row(path, _parsed(path, line, number_of), number_of, step_column)
            if row is not None:
                yield row


def read_trainer_state(path: Path, *, step_column: str | None = None) -> Iterator[Row]:
    """Rows of the `log_history` of a `trainer_state.json`; `line` counts its entries.

    Raises:
        UnreadableLog: it is no JSON, or has no `log_history`.
    """
    with told_apart(path):
        whole = _parsed(path, path.read_text(encoding="utf-8-sig"), 0)
    history = whole.get("log_history")
    if not isinstance(history, list):
        raise UnreadableLog(
            path,
            'has no list "log_history", so it is no trainer_state.json',
            remedy="A file with one JSON object per line must be called *.jsonl.",
        )
    for index, entry in enumerate(history, start=1):
        if not isinstance(entry, dict):
            raise UnreadableLog(path, f"entry {index} of log_history is no object")
        row = _row(path, entry, index, step_column)
        if row is not None:
            yield row


def _parsed(path: Path, text: str, line: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnreadableLog(
            path, f"is not JSON: {error.msg} at character {error.colno}", line=line or error.lineno
        ) from None
    except (RecursionError, ValueError) as error:
        raise UnreadableLog(path, f"is not JSON that can be read: {error}", line=line) from None
    if not isinstance(value, dict):
        raise UnreadableLog(path, f"holds {type(value).__name__} where an object is expected", line=line)
    return value


def _row(path: Path, entry: Mapping[str, Any], line: int, step_column: str | None) -> Row | None:
    flat = dict(_flat(entry))
    name = step_column or step_name(flat)
    step = flat.pop(name, None) if name is not None else None
    if not flat:
        return None
    if name is None or step is None:
        wanted = shown(step_column) if step_column else f"one of {', '.join(STEP_NAMES)}"
        raise UnreadableLog(
            path, f"has no step ({wanted})", line=line, remedy="Name its key with --step KEY."
        )
    if len(flat) > MAX_METRICS:
        raise UnreadableLog(path, f"has {len(flat):,} values; at most {MAX_METRICS:,} can be read", line=line)
    try:
        whole = whole_step(step)
    except ValueError:
        raise UnreadableLog(path, f"the step is {step}, not a whole number", line=line, column=name) from None
    metrics = metric_names(list(flat))
    values = {metric: value for metric, value in zip(metrics, flat.values(), strict=True) if metric}
    return Row(step=whole, values=values, line=line)


def _flat(entry: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    """(name, number) of everything in `entry` that is a number; the rest is left out."""
    for key, value in entry.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            yield from _flat(value, f"{name}/", depth + 1)
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int | float):
            yield name, _as_float(value)
        elif isinstance(value, str) and value.strip().lower() in _WORDS:
            yield name, number(value) or 0.0


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # A JSON integer has no bound; a float has.
        return float("inf") if value > 0 else float("-inf")
