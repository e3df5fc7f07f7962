"""docs/checks.md lists the checks that there are, with the severities that they have."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ROOT / "trainer_agent" / "gradiometer" / "capture" / "checks"
TABLE = re.compile(r"^\| `([a-z_]+)` \| (info|warning|error|critical) \|", re.MULTILINE)


def severities_in_the_code() -> dict[str, str]:
    """Check -> severity, of every `Finding(check=..., severity=...)`; a warning where it says none."""
    found = {}
    for path in CHECKS.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {
            node.target.id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                severity = given.get("severity")
                assert isinstance(given["check"], ast.Name), path.name
                told = severity.value if isinstance(severity, ast.Constant) else "warning"
                found[str(names[given["check"].id])] = str(told)
    return found


def test_the_table_of_checks_is_the_code() -> None:
    documented = dict(TABLE.findall((ROOT / "docs" / "checks.md").read_text(encoding="utf-8")))
    assert len(documented) >= 9
    assert documented == severities_in_the_code()
