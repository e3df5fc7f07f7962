"""The trainer's side of the spool: an append-only queue on disk that survives `kill -9`.

Every record is in the page cache of the kernel when `append` returns, so the death of the process loses nothing;
only the death of the machine can, because nothing here waits for the disk. The layout on disk is described in
`docs/architecture.md`, the format in `spool_segment.py`, the other end in `spool_reader.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gradiometer import process, wire
from gradiometer.spool_reader import Tail
from gradiometer.spool_segment import (
    MAGIC,
    SpoolCorrupt,
    SpoolError,
    SpoolFull,
    SpoolMissing,
    pack,
    segment_path,
    segments,
)

__all__ = [
    "SourceFile",
    "SpoolCorrupt",
    "SpoolError",
    "SpoolFull",
    "SpoolMissing",
    "SpoolWriter",
    "default_root",
    "open_source",
    "read_acked",
    "read_run",
    "read_source",
    "write_atomically",
]

SEGMENT_BYTES: Final = 8 * 1024 * 1024
_SHORTEST_SEGMENT_BYTES: Final = 4096
_SEGMENTS_WITHIN_LIMIT: Final = 8
"""The newest segment is never deleted while its run lives: it must be a small part of what the spool may hold, or a
spool that was full once would stay so."""
LINGER_S: Final = 86400.0
DEFAULT_MAX_BYTES: Final = 4 * 1024**3
ESSENTIAL_RESERVE_BYTES: Final = 1024 * 1024
"""What essential records (how a run ended, what was dropped) may use beyond the limit."""
_RECOUNT_S: Final = 1.0
_PRIVATE_DIRECTORY: Final = 0o700
_LONGEST_FOLDER_CHARS: Final = 180

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `source.json`: who writes here, and which process that is.

    Attributes:
        process_start: `process.start_mark` of the trainer; tells it from a later process with the same pid.
        hostname: the machine on which `pid` means something.
    """

    source: wire.SourceInfo
    pid: int
    process_start: str | None
    hostname: str


def default_root() -> Path:
    """`GRADIOMETER_SPOOL`, or a folder in the user's own data directory."""
    configured = os.environ.get("GRADIOMETER_SPOOL")
    if configured:
        return Path(configured).expanduser()
    data_home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data_home).expanduser() / "gradiometer" / "spool"


def max_bytes_from_environment() -> int:
    """`GRADIOMETER_SPOOL_MAX_BYTES`, the limit of one source; raises `SpoolError` if it is not a number."""
    text = os.environ.get("GRADIOMETER_SPOOL_MAX_BYTES", "")
    try:
        limit_bytes = int(text) if text else DEFAULT_MAX_BYTES
    except ValueError:
        limit_bytes = 0
    if limit_bytes <= 0:
        raise SpoolError(f"GRADIOMETER_SPOOL_MAX_BYTES is {text!r}: set it to a positive number of bytes.")
    return limit_bytes


def linger_from_environment() -> float:
    """`GRADIOMETER_LINGER_S`; raises `SpoolError` if it is not a number of seconds."""
    text = os.environ.get("GRADIOMETER_LINGER_S", "")
    try:
        linger_s = float(text) if text else LINGER_S
    except ValueError:
        linger_s = -1.0
    if not linger_s >= 0.0:
        raise SpoolError(f"GRADIOMETER_LINGER_S is {text!r}: set it to a number of seconds, 0 or more.")
    return linger_s


def open_source(root: Path, run: wire.RunInfo, source: wire.SourceInfo) -> SpoolWriter:
    """Create the folders of one source below `root`, or continue in them, and open it for appending.

    Raises:
        SpoolError: the folder cannot be made or written.
    """
    attempt_directory = root.absolute() / run_folder(run.run_id) / str(source.attempt)
    directory = attempt_directory / f"rank-{source.rank:05d}"
    limit_bytes = max_bytes_from_environment()
    with _translated(directory, "create"):
        _create(directory, run, source)
        return SpoolWriter(directory, max_bytes=limit_bytes)


def run_folder(run_id: str) -> str:
    """Name of a run's folder: its id, percent-encoded; an id too long for a file name is cut and told by a hash."""
    folder = urllib.parse.quote(run_id, safe="")
    if folder.startswith("."):
        folder = "%2E" + folder[1:]
    if len(folder) > _LONGEST_FOLDER_CHARS:
        folder = folder[:_LONGEST_FOLDER_CHARS] + "~" + hashlib.sha256(run_id.encode()).hexdigest()[:16]
    return folder


def _create(directory: Path, run: wire.RunInfo, source: wire.SourceInfo) -> None:
    described = SourceFile(
        source=_as_first_said(directory, source),
        pid=os.getpid(),
        process_start=process.start_mark(os.getpid()),
        hostname=socket.gethostname(),
    )
    attempts_left = 5
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_DIRECTORY)
            run_file = directory.parent / "run.json"
            if not run_file.exists():
                write_atomically(run_file, _encode(run, "the run's config"))
            # Last, because the uplink takes up a source as soon as this file is there.
            write_atomically(directory / "source.json", _encode(described, "the source's environment"))
        except FileNotFoundError:
            # The uplink of a faster rank has just finished and removed the folder that it shared with us.
            attempts_left -= 1
            if not attempts_left:
                raise
        else:
            return


def _as_first_said(directory: Path, source: wire.SourceInfo) -> wire.SourceInfo:
    """`source`, or, where a spool is continued, the writer that the server knows its first records by."""
    try:
        known = read_source(directory).source
    except (OSError, SpoolError):
        return source
    # By these the server tells a spool that goes on from a second one whose records have the same numbers.
    return msgspec.structs.replace(source, host=known.host, pid=known.pid, started_s=known.started_s)


def _encode(value: msgspec.Struct, what: str) -> bytes:
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=1)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise SpoolError(
            f"{what} cannot be written as JSON: {error}. Use numbers, text, lists and dicts."
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old content or the new one; raises `OSError`."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(data)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def read_run(attempt_directory: Path) -> wire.RunInfo:
    """The run that an attempt's folder belongs to.

    Raises:
        FileNotFoundError: no run has been described here yet.
        SpoolError: the file cannot be read.
    """
    return _decode(attempt_directory / "run.json", wire.RunInfo)


def read_source(directory: Path) -> SourceFile:
    """Who writes in a rank's folder; raises like `read_run`."""
    return _decode(directory / "source.json", SourceFile)


def _decode(path: Path, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise SpoolError(
            f"{path} cannot be understood: {error}. It was changed or damaged on disk."
        ) from error


def read_acked(directory: Path) -> int:
    """Last record of a source that its uplink saw acknowledged; 0 if unknown."""
    try:
        return int((directory / "acked").read_bytes())
    except (OSError, ValueError):
        return 0


@contextlib.contextmanager
def _translated(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise SpoolError(
            f"cannot {verb} the spool at {path}: {why}. Free space there or make it writable, "
            "or set GRADIOMETER_SPOOL to another folder."
        ) from error


class SpoolWriter:
    """Appends the numbered records of one source. One thread of one process at a time.

    Args:
        directory: the rank's folder, which exists.
        max_bytes: limit of the segments on disk; what the uplink deletes counts no longer.
        acked_seq: numbers up to here are taken on the server, even if this disk has lost them.
    """

    def __init__(self, directory: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, acked_seq: int = 0) -> None:
        self.directory = directory
        self.attempt_directory = directory.parent
        self._max_bytes = max_bytes
        most_bytes = min(SEGMENT_BYTES, max_bytes // _SEGMENTS_WITHIN_LIMIT)
        self._most_segment_bytes = max(_SHORTEST_SEGMENT_BYTES, most_bytes)
        self._fd: int | None = None
        self._segment_bytes = 0
        self._torn = False
        self._recounted_s = time.monotonic()
        with _translated(directory, "open"):
            self._stored_bytes = _count_bytes(directory)
            self.seq = self._open_last(max(acked_seq, read_acked(directory)))

    def _open_last(self, acked_seq: int) -> int:
        tail = Tail(self.directory)
        seq = tail.seal()
        if acked_seq > seq:
            # This disk lost what the server has: the next record begins a segment, which names its number.
            return acked_seq
        # A segment without records is not continued either: its successor has the same name.
        if tail.path is not None and tail.end_bytes > len(MAGIC):
            self._fd = os.open(tail.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._segment_bytes = tail.end_bytes
        return seq

    # Hot path: called by the agent's thread for every report. Two system calls in the common case, no fsync.
    def append(self, record: bytes, *, essential: bool = False) -> int:
        """Append one record and return its number.

        Args:
            record: an encoded `wire.Record`, at most `wire.MAX_RECORD_BYTES` long.
            essential: may use a small reserve beyond the limit: how a run ended, what was dropped.

        Raises:
            SpoolFull: the limit is reached; nothing was written.
            SpoolError: the disk refused; nothing was written.
        """
        return self.append_batch((record,), essential=essential)

    def append_batch(self, records: Sequence[bytes], *, essential: bool = False) -> int:
        """Append several records with one write: all or none. Returns the last number; raises like `append`."""
        for record in records:
            if len(record) > wire.MAX_RECORD_BYTES:
                limit = wire.MAX_RECORD_BYTES
                raise SpoolError(
                    f"a record of {len(record)} bytes exceeds the limit of {limit}: split the frame."
                )
        packed = b"".join(pack(self.seq + 1 + index, record) for index, record in enumerate(records))
        self._check_room(len(packed), self._max_bytes + (ESSENTIAL_RESERVE_BYTES if essential else 0))
        with _translated(self.directory, "append to"):
            self._write(packed)
        self.seq += len(records)
        return self.seq

    def _check_room(self, num_bytes: int, limit_bytes: int) -> None:
        if self._stored_bytes + num_bytes <= limit_bytes:
            return
        now_s = time.monotonic()
        if now_s - self._recounted_s >= _RECOUNT_S:
            # The uplink deletes what the server has; counting again is the only way to learn of it.
            self._recounted_s = now_s
            with contextlib.suppress(OSError):
                self._stored_bytes = _count_bytes(self.directory)
        if self._stored_bytes + num_bytes > limit_bytes:
            raise SpoolFull(
                f"the spool at {self.directory} holds {self._stored_bytes} bytes, its limit is {self._max_bytes}. "
                "Bring the server back so that it drains, or raise GRADIOMETER_SPOOL_MAX_BYTES."
            )

    def _write(self, packed: bytes) -> None:
        if self._torn:
            self._cut()
        if self._fd is not None and os.fstat(self._fd).st_nlink == 0 and not segments(self.directory):
            # The uplink never deletes the last segment. What is written to a deleted file is lost without an error.
            # Some file systems count no links: the look into the folder is for them.
            raise SpoolError(
                f"the spool at {self.directory} was deleted while the run is writing it. Leave the folders of live runs alone."
            )
        if self._fd is None or self._segment_bytes >= self._most_segment_bytes:
            packed = self._roll(packed)
        assert self._fd is not None
        try:
            written = os.write(self._fd, packed)
            # A short write means a full disk (or a limit): the next call names the error.
            while written < len(packed):
                written += os.write(self._fd, packed[written:])
        except OSError:
            self._torn = True
            with contextlib.suppress(OSError):
                self._cut()
            raise
        self._segment_bytes += len(packed)
        self._stored_bytes += len(packed)

    def _roll(self, packed: bytes) -> bytes:
        path = segment_path(self.directory, self.seq + 1)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.close()
        self._fd, self._segment_bytes = fd, 0
        return MAGIC + packed

    def _cut(self) -> None:
        """Remove a half-written record, so that the next one follows the last whole one."""
        assert self._fd is not None
        os.ftruncate(self._fd, self._segment_bytes)
        self._torn = False
        if self._segment_bytes == 0:
            self.close()

    def close(self) -> None:
        """Close the file; the source stays open for the uplink until an `exit` event is its last record."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def _count_bytes(directory: Path) -> int:
    total_bytes = 0
    for _, path in segments(directory):
        with contextlib.suppress(FileNotFoundError):
            total_bytes += path.stat().st_size
    return total_bytes
