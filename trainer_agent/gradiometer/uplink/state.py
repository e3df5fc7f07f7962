"""What an uplink shares with the trainer in the attempt's folder: its lock, its wake socket, acknowledgements, its state."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from gradiometer.spool import SpoolError, write_atomically

LOCK: Final = "uplink.lock"
STATE: Final = "uplink.json"
LOG: Final = "uplink.log"
WAKE_SOCKET: Final = "wake.sock"

_SOCKET_PATH_BYTES: Final = 100
"""A little less than the 104 to 108 bytes that systems allow for the path of a Unix socket."""
_LOCK_PATIENCE_S: Final = 1.0
_LOCK_RETRY_S: Final = 0.02


class UplinkState(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `uplink.json`, for people and for `wait_delivered`.

    Attributes:
        state: `connecting`, `connected`, `waiting` (for the next attempt), `stopped` (a change is needed), `done`.
        transport: `websocket` or `post`.
        last_error: what went wrong last, where, and what to do; empty after a success.
        acked: last acknowledged record per rank.
        spooled: last record in the spool per rank.
        rejected: number of records that the server refused, per rank.
        backlog_bytes: size of all spool segments still on disk.
        updated_s: Unix seconds.
    """

    pid: int
    url: str
    state: str
    transport: str = "websocket"
    last_error: str = ""
    acked: dict[int, int] = {}
    spooled: dict[int, int] = {}
    rejected: dict[int, int] = {}
    backlog_bytes: int = 0
    updated_s: float = 0.0


def write_state(attempt_directory: Path, state: UplinkState) -> None:
    """Replace `uplink.json`; raises `OSError`."""
    write_atomically(attempt_directory / STATE, msgspec.json.format(msgspec.json.encode(state), indent=1))


def read_state(attempt_directory: Path) -> UplinkState | None:
    """What the uplink said last, or None."""
    try:
        return msgspec.json.decode((attempt_directory / STATE).read_bytes(), type=UplinkState)
    except (OSError, msgspec.DecodeError):
        return None


class Lock:
    """The exclusive right to be the uplink of an attempt on this node; the kernel ends it with the process."""

    def __init__(self, attempt_directory: Path) -> None:
        self._path = attempt_directory / LOCK
        self._fd: int | None = None

    def acquire(self, patience_s: float = _LOCK_PATIENCE_S) -> bool:
        """Take the lock; False if another uplink holds it. Raises `SpoolError` where files cannot be locked."""
        until_s = time.monotonic() + patience_s
        # Patience, because a trainer that only asks whether the lock is held has it for a moment itself.
        while not self._try(fcntl.LOCK_EX):
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOCK_RETRY_S)
        return True

    def is_held(self) -> bool:
        """Whether an uplink holds the lock now."""
        if not self._path.exists() or not self._try(fcntl.LOCK_SH):
            return self._path.exists()
        self.release()
        return False

    def _try(self, mode: int) -> bool:
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unlockable(self._path, error) from error
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
            # The holder removes the file before it looks for work the last time: a lock on that one is worth nothing.
            if os.fstat(fd).st_nlink == 0:
                os.close(fd)
                return self._try(mode)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise _unlockable(self._path, error) from error
        self._fd = fd
        return True

    def remove(self) -> None:
        """Remove the file while holding the lock, so that the next one to come starts a new uplink."""
        self._path.unlink(missing_ok=True)

    def release(self) -> None:
        """Give the lock back, if held."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def _unlockable(path: Path, error: OSError) -> SpoolError:
    return SpoolError(
        f"cannot lock {path}: {error.strerror or error}. Set GRADIOMETER_SPOOL to a writable folder on a local disk."
    )


@contextlib.contextmanager
def _socket_address(attempt_directory: Path) -> Iterator[str | None]:
    """A path of the wake socket that is short enough, or None where there is no way to make one."""
    plain = str(attempt_directory / WAKE_SOCKET)
    if len(os.fsencode(plain)) <= _SOCKET_PATH_BYTES:
        yield plain
    elif sys.platform == "linux":
        fd = os.open(attempt_directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}/{WAKE_SOCKET}"
        finally:
            os.close(fd)
    else:
        yield None


def open_wake_socket(attempt_directory: Path) -> socket.socket | None:
    """Bind the socket that trainers wake the uplink with; None where that is impossible (the uplink then polls)."""
    (attempt_directory / WAKE_SOCKET).unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        with _socket_address(attempt_directory) as address:
            if address is not None:
                sock.bind(address)
                sock.setblocking(False)
                return sock
    except OSError:
        # Some network file systems have no sockets.
        sock.close()
        return None
    sock.close()
    return None


# Hot path: called by the agent's thread after every report. Never waits, never raises.
def wake(attempt_directory: Path) -> bool:
    """Tell the uplink that there is more to read; False if nobody listens."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            with _socket_address(attempt_directory) as address:
                if address is None:
                    return False
                sock.sendto(b"!", address)
    except BlockingIOError:
        # Its queue is full of wake-ups: it will look anyway.
        return True
    except OSError:
        return False
    return True
