"""Identity of a process: enough to tell it from a later one that got the same pid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def start_mark(pid: int) -> str | None:
    """A text that is equal for two looks at the same process only; None if there is no such process."""
    if sys.platform == "linux":
        stat = stat_fields(pid)
        return None if stat is None else f"{_boot_id()}:{stat[_START_TICKS]}"
    return _start_from_ps(pid)


_STATE, _START_TICKS, _EXIT_CODE = 0, 19, 49
"""Places of fields 3, 22 and 52 of `/proc/<pid>/stat` among those after the command's name."""


def stat_fields(pid: int) -> list[str] | None:
    """Fields of `/proc/<pid>/stat` from the third on, or None if there is no such process."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may hold blanks and parentheses of its own.
    return content.rpartition(")")[2].split()


def zombie_status(pid: int) -> int | None:
    """Wait status of a process that has ended and was not yet waited for; None if it is not in that state."""
    stat = stat_fields(pid)
    if stat is None or stat[_STATE] != "Z":
        return None
    return int(stat[_EXIT_CODE])


def is_running(pid: int, mark: str | None) -> bool:
    """Whether the process that had `mark` still runs; one that only waits to be reaped does not."""
    if mark is None or start_mark(pid) != mark:
        return False
    stat = stat_fields(pid) if sys.platform == "linux" else None
    return stat is None or stat[_STATE] not in ("Z", "X")


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_from_ps(pid: int) -> str | None:
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
