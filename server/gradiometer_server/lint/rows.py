"""What a log file is made of: rows of a step and its values, and the complaint about what cannot be read as such."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradiometer_server.errors import GradiometerError

MAX_STEP: Final = 2**53
"""Above it a step that was written as a floating-point number is no longer exact."""
MAX_METRICS: Final = 2000
MAX_NAME_CHARS: Final = 200
_MISSING: Final = frozenset({"", "none", "null", "na", "n/a", "#n/a", "-", "--"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Values of one step, in the order of the file.

    Attributes:
        values: by metric name; what is missing in the file is missing here. NaN and infinities as written.
        line: where it begins in the file, from 1.
    """

    step: int
    values: dict[str, float]
    line: int


class UnreadableLog(GradiometerError):
    """A file that cannot be read as a training log; says where and what to do."""

    code = "unreadable_log"

    def __init__(
        self, path: Path, message: str, *, line: int = 0, column: str = "", remedy: str = ""
    ) -> None:
        where = f"{path}" + (f", line {line}" * bool(line)) + (f", column {shown(column)}" * bool(column))
        super().__init__(f"{where}: {message}", remedy=remedy)


def shown(text: str) -> str:
    """`text` quoted for one line of a terminal: control characters escaped, long ones cut."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def number(text: str) -> float | None:
    """The number that a cell holds; None: the cell is empty or says that nothing is there.

    Raises:
        ValueError: it is no number.
    """
    text = text.strip()
    if text.lower() in _MISSING:
        return None
    if "_" in text:
        raise ValueError(text)  # float() reads 1_000, which no tool writes and a mistyped cell may hold.
    return float(text)


def whole_step(value: float) -> int:
    """`value` as a step.

    Raises:
        ValueError: it is not a whole number of which floating-point numbers can tell all neighbours apart.
    """
    if not math.isfinite(value) or abs(value) > MAX_STEP or value != int(value):
        raise ValueError(f"{value} is not a whole number")
    return int(value)
