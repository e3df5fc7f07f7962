"""Runs every test in stages and closes with one line of totals: `python -m tests.support.run_all [pytest options]`.

Stages, because their needs differ: most tests share the cores; tests that kill processes do so among themselves, and
the browser's get the machine (and Playwright's event loop a process) for themselves. Every stage runs even if an
earlier one failed, so that one run shows all that is wrong.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

STAGES = (
    (
        "unit, property, integration, scenarios",
        [
            "tests/unit",
            "tests/property",
            "tests/integration",
            "tests/scenarios",
            "-n",
            "2",
            "--dist",
            "loadfile",
        ],
    ),
    ("faults", ["tests/faults", "-n", "2", "--dist", "loadfile"]),
    ("browser", ["tests/browser"]),
)
NO_TESTS_COLLECTED = 5


def run_stage(name: str, arguments: list[str], options: list[str]) -> tuple[int, Counter[str]]:
    """Run one pytest process; returns its exit code and its counts by outcome."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *arguments,
            f"--junitxml={report}",
            "--durations=5",
            *options,
        ]
        print(f"\n=== {name}", flush=True)
        code = subprocess.run(command, check=False).returncode
        return code, count(report)


def count(report: Path) -> Counter[str]:
    """Outcomes in a JUnit report; a test with an error counts as failed."""
    counts: Counter[str] = Counter()
    if not report.is_file():
        return counts
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        total = int(suite.get("tests", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        counts.update(passed=total - failed - skipped, failed=failed, skipped=skipped)
    return counts


def main(options: list[str]) -> int:
    """Run all stages; returns 0 only if every one passed and none was empty."""
    begun_s = time.monotonic()
    totals: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    bad = []
    for name, arguments in STAGES:
        code, counts = run_stage(name, arguments, options)
        totals.update(counts)
        if code == NO_TESTS_COLLECTED and options:
            continue  # A selection such as -k may leave a stage empty; a full run may not.
        if code != 0:
            bad.append(f"{name} (exit code {code})")
    if bad:
        print(f"\nFailed stages: {', '.join(bad)}")
    print(f"\nAll stages took {time.monotonic() - begun_s:.0f} s")
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
