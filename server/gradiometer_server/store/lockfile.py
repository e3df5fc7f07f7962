"""One server per SQLite file: an advisory lock beside the file, let go by the kernel even after `kill -9`."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gradiometer_server.errors import ConfigurationError


class LockFile:
    """A held lock; made by `take`."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path

    @classmethod
    def take(cls, database: Path, *, now_s: float) -> LockFile:
        """Lock `<database>.lock` and note our pid in it.

        Raises:
            ConfigurationError: another process holds it (its pid is named), or the file cannot be written.
        """
        # Beside the file itself: under two names of links, two servers would hold two locks.
        real = database.resolve()
        path = real.with_name(real.name + ".lock")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"the lock file {path} cannot be written: {error.strerror}.",
                remedy="Make the folder writable for this user, or name another file with GRADIOMETER_DATABASE_URL.",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").partition(" ")[0] or "unknown"
            os.close(descriptor)
            raise ConfigurationError(
                f"another server (pid {holder}) is using the database {database}.",
                remedy="Stop that server, or name another file with GRADIOMETER_DATABASE_URL.",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} since {now_s:.3f}\n".encode(), 0)
        return cls(descriptor, path)

    def release(self) -> None:
        """Let go. The file stays: removing it would let two servers lock two files of the same name."""
        os.close(self._descriptor)
