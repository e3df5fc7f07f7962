"""The uplink's side of the spool: reads records while they are being written, and deletes what the server has."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gradiometer import wire
from gradiometer.spool_segment import (
    HEADER,
    MAGIC,
    Ending,
    Parsed,
    SpoolCorrupt,
    SpoolError,
    SpoolMissing,
    find_next,
    parse,
    segments,
)

_CHUNK_BYTES: Final = 256 * 1024
_NUMBER: Final = struct.Struct("<Q")


class SpoolReader:
    """Reads one source's records in order, starting anywhere; never waits for more."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path: Path | None = None
        self._fd: int | None = None
        self._offset = 0
        self._seq = 0

    def records(self, first_seq: int = 1) -> Iterator[tuple[int, bytes]]:
        """All records from `first_seq` to the end as it is now; raises like `read`."""
        seq = first_seq
        while batch := self.read(seq, _CHUNK_BYTES):
            yield from enumerate(batch, seq)
            seq += len(batch)

    def read(self, first_seq: int, max_bytes: int) -> list[bytes]:
        """Records `first_seq`, `first_seq` + 1, ... of one segment, together about `max_bytes` long, at least one.

        An empty list means that nothing whole is there yet; a torn tail counts as not there and may still grow.

        Raises:
            SpoolCorrupt: record `first_seq` is damaged; reading can go on at its `resume_seq`.
            SpoolMissing: it has been deleted.
            SpoolError: the disk cannot be read.
        """
        try:
            if self._fd is None or self._seq != first_seq:
                self._seek(first_seq)
            return self._read_here(max_bytes)
        except OSError as error:
            self.close()
            raise SpoolError(
                f"cannot read the spool at {self.directory}: {error.strerror or error}."
            ) from error

    def _read_here(self, max_bytes: int) -> list[bytes]:
        size_bytes = max_bytes
        while self._fd is not None:
            data = os.pread(self._fd, size_bytes, self._offset)
            parsed = parse(data, self._seq)
            if parsed.records:
                self._seq += len(parsed.records)
                self._offset += parsed.num_bytes
                return list(parsed.records)
            if parsed.needed_bytes > len(data) == size_bytes:
                size_bytes = parsed.needed_bytes
                continue
            if not self._go_on(parsed):
                return []
        return []

    def _go_on(self, parsed: Parsed) -> bool:
        """At the end of what can be read here: whether there is something else to try; raises `SpoolCorrupt`."""
        assert self._fd is not None
        assert self._path is not None
        successor = next((first for first, path in segments(self.directory) if path > self._path), None)
        if successor == self._seq:
            self._open(self._seq)
            return True
        rest = _read_rest(self._fd, self._offset)
        again = parse(rest, self._seq)
        if again.records:
            # Written between the two looks.
            return True
        found = find_next(rest, self._seq) if again.ending is not Ending.WHOLE else None
        resume_seq = found[0] if found else successor
        if resume_seq is None and again.ending is not Ending.BAD:
            return False
        why = again.ending.value if rest else "the segment ends too early"
        raise SpoolCorrupt(self._path, seq=self._seq, resume_seq=resume_seq, why=why)

    def _seek(self, seq: int) -> None:
        self.close()
        found = segments(self.directory)
        if not found:
            return
        if found[0][0] > seq:
            raise SpoolMissing(self.directory, seq=seq, first_seq=found[0][0])
        self._open(seq)
        assert self._fd is not None
        while self._seq < seq:
            step = _hop(self._fd, self._offset, self._seq)
            if step is None:
                # Not written yet: look again at the next call.
                self.close()
                return
            self._seq, self._offset = step
        if self._seq > seq:
            resume_seq, path = self._seq, self._path
            assert path is not None
            self.close()
            raise SpoolCorrupt(path, seq=seq, resume_seq=resume_seq, why="its header is damaged")

    def _open(self, seq: int) -> None:
        """Open the segment that holds record `seq`, at its first record."""
        first_seq, path = max(entry for entry in segments(self.directory) if entry[0] <= seq)
        self.close()
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._path, self._seq, self._offset = path, first_seq, len(MAGIC)
        magic = os.pread(self._fd, len(MAGIC), 0)
        if magic != MAGIC[: len(magic)]:
            later = [first for first, _ in segments(self.directory) if first > first_seq]
            self.close()
            raise SpoolCorrupt(path, seq=seq, resume_seq=min(later, default=None), why="it is not a segment")

    def delete_acknowledged(self, acked_seq: int) -> None:
        """Delete the segments that hold nothing after `acked_seq`; the last one stays, it carries the numbering."""
        found = segments(self.directory)
        for (_, path), (next_first_seq, _) in itertools.pairwise(found):
            if next_first_seq > acked_seq + 1:
                return
            if path == self._path:
                self.close()
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the open segment, if any; the next `read` opens it again."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


class Tail:
    """Follows the end of one source's spool by its headers alone, without reading payloads.

    Attributes:
        seq: last whole record; 0 if there is none.
        path: the last segment, or None.
        end_bytes: where its last whole record ends.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seq = 0
        self.path: Path | None = None
        self.end_bytes = 0
        self._last_offset: int | None = None

    def advance(self) -> int:
        """Look for new records and return the last number. Raises `OSError`."""
        fd = self._open_last()
        if fd is None:
            return self.seq
        try:
            while (step := _hop(fd, self.end_bytes, self.seq + 1)) is not None:
                self._last_offset = self.end_bytes if step[0] == self.seq + 2 else None
                self.seq, self.end_bytes = step[0] - 1, step[1]
        finally:
            os.close(fd)
        return self.seq

    def _open_last(self) -> int | None:
        found = segments(self.directory)
        if not found:
            return None
        first_seq, path = found[-1]
        if path != self.path:
            self.path, self.seq, self.end_bytes = path, max(self.seq, first_seq - 1), len(MAGIC)
            self._last_offset = None
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def last_record(self) -> bytes | None:
        """The last whole record, or None if there is none in the last segment or it is damaged. Raises `OSError`."""
        self.advance()
        if self.path is None or self._last_offset is None:
            return None
        with self.path.open("rb") as file:
            data = os.pread(file.fileno(), self.end_bytes - self._last_offset, self._last_offset)
        parsed = parse(data, self.seq)
        return parsed.records[0] if parsed.records else None

    def seal(self) -> int:
        """Check the last segment wholly and cut a torn tail off; for the one who writes next. Returns the last number.

        Raises:
            SpoolError: the last segment is not one.
            OSError: it cannot be read or cut.
        """
        found = segments(self.directory)
        if not found:
            return 0
        first_seq, self.path = found[-1]
        data = self.path.read_bytes()
        if data[: len(MAGIC)] != MAGIC[: len(data)]:
            raise SpoolError(f"{self.path} is not a segment of this version. Move it away to go on.")
        self.seq, self.end_bytes = _last_intact(data, first_seq)
        if self.end_bytes < len(data):
            os.truncate(self.path, self.end_bytes)
        return self.seq


def _last_intact(data: bytes, first_seq: int) -> tuple[int, int]:
    seq, offset = first_seq, len(MAGIC)
    if len(data) < len(MAGIC):
        return seq - 1, 0
    while True:
        parsed = parse(data[offset:], seq)
        seq, offset = seq + len(parsed.records), offset + parsed.num_bytes
        if parsed.ending is Ending.WHOLE:
            return seq - 1, offset
        found = find_next(data[offset:], seq)
        if found is None:
            return seq - 1, offset
        seq, offset = found[0], offset + found[1]


def _hop(fd: int, offset: int, seq: int) -> tuple[int, int] | None:
    """From the start of record `seq` to the start of the next: (its number, its offset); None if it is not whole."""
    header = os.pread(fd, HEADER.size, offset)
    if len(header) < HEADER.size:
        return None
    length, _, number = HEADER.unpack(header)
    end = offset + HEADER.size + length
    whole = number == seq and length <= wire.MAX_RECORD_BYTES and end <= os.fstat(fd).st_size
    if whole and os.pread(fd, _NUMBER.size, end + HEADER.size - _NUMBER.size) in (_NUMBER.pack(seq + 1), b""):
        return seq + 1, end
    # The header is damaged, or the record is torn: only an intact one after it tells the two apart.
    found = find_next(_read_rest(fd, offset), seq)
    if found is not None:
        return found[0], offset + found[1]
    return (seq + 1, end) if whole else None


def _read_rest(fd: int, offset: int) -> bytes:
    size_bytes = os.fstat(fd).st_size - offset
    return os.pread(fd, size_bytes, offset) if size_bytes > 0 else b""
