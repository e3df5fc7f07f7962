"""docs/rules.md is what the rules say of themselves, and the comparison in it is what the benchmark finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradiometer_server.alerting.explain import _TEXTS
from gradiometer_server.alerting.rules import make_rules

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
RATE_GOAL = 0.5


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the folder of the benchmarks, whose modules import one another by their bare names."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, sys.path)]))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT / "benchmarks",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_rule_has_its_section_as_its_module_says() -> None:
    made = benchmark("-c", "import rules_document; print('\\n'.join(rules_document.rule_sections()))")
    assert made.returncode == 0, made.stderr
    assert made.stdout in PAGE, "run: python benchmarks/detectors.py"
    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) >= {rule.name for rule in make_rules()}


def test_every_rule_has_a_text() -> None:
    assert {rule.name for rule in make_rules()} <= set(_TEXTS)


def test_no_rule_of_ours_cries_wolf() -> None:
    """The figures of the page: false episodes per 1,000 healthy steps."""
    num_rows = 0
    for table, num_curves in (
        (PAGE.partition("### Losses")[2].partition("###")[0], 5),
        (PAGE.partition("### Gradient norms")[2], 4),
    ):
        for line in re.findall(r"^\| \*\*.*$", table, re.MULTILINE):
            num_rows += 1
            rates = [float(cell) for cell in line.split("|")[2 : 2 + num_curves]]
            assert max(rates) <= RATE_GOAL, line
    assert num_rows == 10


@pytest.mark.slow
def test_the_comparison_is_up_to_date() -> None:
    made = benchmark("detectors.py", "--check")
    assert made.returncode == 0, made.stdout + made.stderr
