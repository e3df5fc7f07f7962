"""The trainer's handle on its uplink: start it, wake it, wait for it. The uplink itself is a process of its own.

Imports nothing heavy: the WebSocket client is loaded by that process alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Final

from gradiometer.spool import SpoolError, read_acked
from gradiometer.uplink.state import LOG, Lock, read_state, wake

__all__ = ["UplinkError", "ensure_running", "is_running", "trouble", "wait_delivered", "wake"]

START_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.01
_LOOK_FOR_DEATH_S: Final = 0.25
_slow: Final[list[subprocess.Popen[bytes]]] = []
"""Launchers that took too long; kept, because Python complains of a child that it forgets."""


class UplinkError(SpoolError):
    """The uplink process did not start; the records stay in the spool for `gradiometer sync`."""


def ensure_running(
    attempt_directory: Path, *, url: str, token: str | None, patience_s: float = START_TIMEOUT_S
) -> None:
    """Start the uplink of this attempt on this node unless it runs; returns when it listens for `wake`.

    One that is not ready within `patience_s` seconds is left to start all the same.

    The process belongs to no terminal, process group or parent of the trainer, so that nothing that ends the
    trainer ends it too.

    Raises:
        UplinkError: it did not start; says why and what to do.
        SpoolError: the folder cannot be locked.
    """
    if is_running(attempt_directory):
        return
    command = [
        sys.executable,
        "-P",
        "-m",
        "gradiometer.uplink",
        str(attempt_directory),
        "--url",
        url,
        "--detach",
    ]
    log = attempt_directory / LOG
    try:
        with log.open("ab") as errors:
            launcher = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
                cwd="/",
                env=_environment(token),
            )
        code = launcher.wait(patience_s)
    except subprocess.TimeoutExpired:
        _slow.append(launcher)
        raise UplinkError(_failed(f"it is not ready after {patience_s:.1f} s", log)) from None
    except OSError as error:
        raise UplinkError(_failed(str(error), log)) from error
    if code != 0:
        raise UplinkError(_failed(f"exit code {code}", log))


def is_running(attempt_directory: Path) -> bool:
    """Whether this attempt has an uplink on this node now; raises `SpoolError` if its folder cannot be locked."""
    return Lock(attempt_directory).is_held()


def trouble(attempt_directory: Path) -> str:
    """What keeps the uplink from delivering, where, and what to do; empty if nothing does."""
    state = read_state(attempt_directory)
    return "" if state is None else state.last_error


def _environment(token: str | None) -> dict[str, str]:
    """The trainer's environment, made independent of its working directory."""
    environment = {key: value for key, value in os.environ.items() if key != "GRADIOMETER_TOKEN"}
    if token:
        # Not on the command line, which every user of the machine can read.
        environment["GRADIOMETER_TOKEN"] = token
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    package_root = Path(__file__).resolve().parents[2]
    if str(package_root) not in sysconfig.get_paths().values():
        entries.append(str(package_root))
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in entries)
    # It does no arithmetic: no pool of threads beside the trainer's.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _failed(why: str, log: Path) -> str:
    try:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
    except OSError:
        last = []
    detail = f" Its last words: {last[0]}" if last else ""
    return f"the uplink of {log.parent} did not start: {why}.{detail} Send the spool later with `gradiometer sync`."


def wait_delivered(attempt_directory: Path, rank: int, seq: int, deadline_s: float) -> bool:
    """Wait until the server has record `seq` of a rank durably.

    Args:
        attempt_directory: as in `ensure_running`.
        rank: whose record.
        seq: its number.
        deadline_s: how many seconds to wait at most.

    Returns:
        False if the time is over, the uplink has stopped for good, or there is none.
    """
    until_s = time.monotonic() + deadline_s
    look_s = time.monotonic() + _LOOK_FOR_DEATH_S
    directory = attempt_directory / f"rank-{rank:05d}"
    while read_acked(directory) < seq:
        if not directory.is_dir():
            # The uplink removes a folder only when the server has all of it.
            return True
        state = read_state(attempt_directory)
        if time.monotonic() >= until_s or (state is not None and state.state == "stopped"):
            return read_acked(directory) >= seq
        if time.monotonic() >= look_s:
            look_s = time.monotonic() + _LOOK_FOR_DEATH_S
            if not is_running(attempt_directory):
                # It may have ended because all is delivered.
                return read_acked(directory) >= seq or not directory.is_dir()
        time.sleep(_POLL_S)
    return True
