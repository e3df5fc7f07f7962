"""Finds processes that a test started and left running.

Every test runs with a mark of its own in its environment, which all its descendants inherit, also those that
detached themselves (the uplink does).
"""

from __future__ import annotations

import os
import time

import psutil

MARK = "GRADIOMETER_TEST_MARK"
EXEMPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Helpers of the Python library that live as long as the test process by design."""


def marked_processes(mark: str) -> list[psutil.Process]:
    """Living processes, other than this one, that carry `mark`."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get(MARK) != mark or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if not any(word in " ".join(process.cmdline()) for word in EXEMPT):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found


def end_leaked(mark: str, *, patience_s: float) -> list[str]:
    """Wait for marked processes to end by themselves, kill the rest, and return what they were."""
    deadline_s = time.monotonic() + patience_s
    leaked = marked_processes(mark)
    while leaked and time.monotonic() < deadline_s:
        time.sleep(0.05)
        leaked = marked_processes(mark)
    described = []
    for process in leaked:
        try:
            described.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return described
