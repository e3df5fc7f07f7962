"""`kill -9` of the real server while it ingests and folds: what was acknowledged is there, once, on both engines.

A few kills; `python -m tests.faults.crash_100` does a hundred.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.faults.crash_100 import hammer
from tests.support.server import Server

KILLS = 6


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_double_nothing(
    server: Callable[..., Server], database_url: str
) -> None:
    one = server(database_url)
    hammer(one, times=KILLS, seed=11)
    command = [sys.executable, "-m", "gradiometer_server", "db", "check", "--database", database_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "no problem found"), (
        done.stdout + done.stderr
    )
