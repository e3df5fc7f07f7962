"""The table of docs/modes.md, made from what the tests of the modes measured.

The tests leave one file per mode in `build/modes`; `python -m tests.support.modes_table` turns them into the page
(`make modes` does both). A test holds the committed page against the modes that exist and the figures measured.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "modes"
PAGE = ROOT / "docs" / "modes.md"
BEGIN, END = "<!-- table: made by `make modes` -->", "<!-- end of table -->"
HEADER = (
    "| mode | processes | what is read | worst relative error of a norm | counts | weights | remarks |\n"
    "|---|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one mode showed. That counts are exact and weights identical is asserted before a row is kept.

    Attributes:
        worst_error: largest relative error of a layer's or the whole gradient's norm.
    """

    name: str
    world_size: int
    reads: str
    worst_error: float
    remarks: str

    @property
    def bound(self) -> str:
        """The error rounded up to a power of ten, which is the same on every machine, nearly."""
        if self.worst_error == 0:
            return "0"
        return f"< 1e{math.floor(math.log10(self.worst_error)) + 1}"

    def cells(self) -> list[str]:
        """As the table shows it."""
        return [
            self.name,
            str(self.world_size),
            self.reads,
            self.bound,
            "exact",
            "identical",
            self.remarks,
        ]


def keep(row: Row) -> None:
    """Leave the row for the table. Never fails a test: a read-only checkout has no table to make."""
    slug = "".join(char if char.isalnum() else "-" for char in row.name.lower())
    try:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{slug}.json").write_text(json.dumps(asdict(row)))
    except OSError as error:
        print(f"modes: not kept: {error}", file=sys.stderr)


def page_with(rows: list[Row], page: str) -> str:
    """`page` with its table replaced."""
    lines = "".join("| " + " | ".join(row.cells()) + " |\n" for row in rows)
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{HEADER}{lines}\n{END}{after}"


def rows_of(page: str) -> dict[str, list[str]]:
    """Cells of the page's table by mode."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0]: row for row in rows}


def bound_of(cell: str) -> float:
    """The number in the cell of the error."""
    return float(cell.removeprefix("< "))


def main() -> int:
    """Rewrite the page's table; returns the exit code."""
    from tests.integration.modes.all_modes import ALL_MODES

    rows, missing = [], []
    for mode in ALL_MODES:
        path = RESULTS / f"{mode.slug}.json"
        if path.is_file():
            rows.append(Row(**json.loads(path.read_text())))
        else:
            missing.append(mode.name)
    if missing:
        print(f"no result for: {', '.join(missing)}; run the tests of the modes first", file=sys.stderr)
        return 1
    PAGE.write_text(page_with(rows, PAGE.read_text()))
    print(f"{PAGE.relative_to(ROOT)}: {len(rows)} modes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
