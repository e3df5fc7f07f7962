"""How a trainer ended: watches one process by pid and start time, and finds its wait status even after it is reaped.

On Linux a pidfd becomes readable at the death. The status comes, in this order, from
  1. `PIDFD_GET_INFO` with `PIDFD_INFO_EXIT` (kernel 6.15 and later): also after the parent has reaped the process;
  2. the exit code in `/proc/<pid>/stat`, while the parent has not;
  3. the log of `faulthandler`, for signals that the interpreter itself could see;
  4. what the trainer itself expected when its interpreter ended;
  5. elimination: `SIGKILL` is the one end that leaves no trace, so it is inferred and marked as such.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import re
import select
import signal
import struct
import sys
from pathlib import Path
from typing import Final

from gradiometer import last_words, process

_PIDFD_INFO: Final = struct.Struct("<QQ11Ii")
"""`struct pidfd_info`, version 0: mask, cgroup id, eleven ids, exit code."""
_PIDFD_GET_INFO: Final = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT: Final = 1 << 3
_REAP_WAIT_S: Final = 0.2

_FAULTS: Final = (
    (re.compile(rb"Segmentation fault"), "SIGSEGV"),
    (re.compile(rb"Aborted"), "SIGABRT"),
    (re.compile(rb"Bus error"), "SIGBUS"),
    (re.compile(rb"Floating[- ]point exception"), "SIGFPE"),
    (re.compile(rb"Illegal instruction"), "SIGILL"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The attributes of an `exit` event."""

    code: int | None
    signal: str | None
    inferred: bool
    reason: str

    def attributes(self) -> dict[str, object]:
        """As `wire.Event` carries them."""
        return dataclasses.asdict(self)


class TrainerWatch:
    """Watches one trainer until it dies.

    Args:
        pid: the process that writes the spool.
        start: its `process.start_mark`; None if it could not be read.
        directory: the rank's folder, with the log of that process's `faulthandler` and its last words.
        oom_file: counts the kernel's OOM kills around it; by default found by its cgroup.
    """

    def __init__(self, *, pid: int, start: str | None, directory: Path, oom_file: Path | None = None) -> None:
        self._pid, self._start, self._directory = pid, start, directory
        self._pidfd = _open_pidfd(pid)
        self._oom_file = oom_file or find_oom_file(pid)
        self._oom_kills = _count_oom_kills(self._oom_file)
        # Opened first and compared after: a pid that changed hands before is then recognised.
        if process.start_mark(pid) != start:
            self.close()

    @property
    def pidfd(self) -> int | None:
        """A descriptor that becomes readable when the trainer dies, where the system has such a thing."""
        return self._pidfd

    def alive(self) -> bool:
        """Whether the trainer still runs."""
        if self._pidfd is not None:
            return not select.select([self._pidfd], [], [], 0)[0]
        return process.is_running(self._pid, self._start)

    def ending(self) -> Ending:
        """How the trainer ended; call it once `alive` is False. May wait 0.2 s for the parent to reap it."""
        status = self._wait_status()
        if status is not None:
            return self._told_by_kernel(status)
        fault = _fault_signal(self._directory / "fault.log")
        if fault is not None:
            return Ending(code=None, signal=fault, inferred=True, reason=f"faulthandler logged {fault}")
        words = last_words.read(self._directory)
        if words is not None:
            reason = "what the trainer expected at its end; its exit status was not to be had"
            return Ending(code=words.code, signal=None, inferred=words.guessed, reason=reason)
        reason = "the process vanished without a trace, as SIGKILL does; its exit status was not to be had"
        return Ending(
            code=None, signal="SIGKILL", inferred=True, reason=self._oom_reason("SIGKILL") or reason
        )

    def _told_by_kernel(self, status: int) -> Ending:
        if not os.WIFSIGNALED(status):
            code = os.waitstatus_to_exitcode(status)
            return Ending(code=code, signal=None, inferred=False, reason=f"exit code {code}")
        name = _signal_name(os.WTERMSIG(status))
        reason = self._oom_reason(name) or f"killed by {name}"
        return Ending(code=None, signal=name, inferred=False, reason=reason)

    def _wait_status(self) -> int | None:
        for wait_s in (0.0, _REAP_WAIT_S):
            # Between "dead" and "reaped" the kernel may tell neither here nor there for a moment.
            select.select([], [], [], wait_s)
            status = None if self._pidfd is None else _pidfd_status(self._pidfd)
            if status is None and self._start is not None and process.start_mark(self._pid) == self._start:
                status = process.zombie_status(self._pid)
            if status is not None:
                return status
        return None

    def _oom_reason(self, name: str) -> str | None:
        if name != "SIGKILL" or self._oom_kills is None:
            return None
        kills = _count_oom_kills(self._oom_file)
        if kills is None or kills <= self._oom_kills:
            return None
        return "killed by the kernel's OOM killer: the memory limit of its cgroup was reached"

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd is not None:
            fd, self._pidfd = self._pidfd, None
            os.close(fd)


def _open_pidfd(pid: int) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        # Dead already, or a kernel before 5.3.
        return None


def _pidfd_status(pidfd: int) -> int | None:
    if sys.platform != "linux":
        return None
    buffer = bytearray(_PIDFD_INFO.size)
    struct.pack_into("<Q", buffer, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    fields = _PIDFD_INFO.unpack(buffer)
    return int(fields[-1]) if fields[0] & _PIDFD_INFO_EXIT else None


def _fault_signal(fault_log: Path) -> str | None:
    try:
        content = fault_log.read_bytes()
    except OSError:
        return None
    return next((name for pattern, name in _FAULTS if pattern.search(content)), None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def find_oom_file(pid: int) -> Path | None:
    """The file in which the memory cgroup of a process counts its OOM kills (version 2, else version 1)."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    groups = {names: path.lstrip("/") for _, names, path in (line.split(":", 2) for line in lines)}
    root = Path("/sys/fs/cgroup")
    candidates = [root / groups.get("", "") / "memory.events", root / "memory.events"]
    candidates += [root / "memory" / groups.get("memory", "") / "memory.oom_control"]
    candidates += [root / "memory" / "memory.oom_control"]
    return next((path for path in candidates if path.is_file()), None)


def _count_oom_kills(path: Path | None) -> int | None:
    try:
        fields = {} if path is None else dict(line.split() for line in path.read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
