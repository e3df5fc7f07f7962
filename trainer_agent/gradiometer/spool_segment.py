"""The format of a spool's segment files, and the errors a spool can raise: pure functions over bytes and paths.

A segment is named by the number of its first record (`00000001.seg`). It holds `MAGIC`, then records:
u32 length, u32 CRC-32 (of the number and the payload), u64 number, payload; all little-endian.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import zlib
from pathlib import Path
from typing import Final

from gradiometer import wire

MAGIC: Final = b"GMSPOOL1"
HEADER: Final = struct.Struct("<IIQ")
_SEQ: Final = struct.Struct("<Q")

RESYNC_RECORDS: Final = 64
"""How many numbers ahead of a damaged record the next intact one is looked for."""


class SpoolError(Exception):
    """The spool cannot do what was asked; the message names the path and the remedy."""


class SpoolFull(SpoolError):
    """The spool has reached its size limit: drop the record and count it."""


class SpoolCorrupt(SpoolError):
    """A record is damaged, or numbers are missing.

    Attributes:
        path: the segment that holds the damage.
        seq: the first record that cannot be read.
        resume_seq: the next intact record after it, or None when none has been written yet.
    """

    def __init__(self, path: Path, *, seq: int, resume_seq: int | None, why: str) -> None:
        self.path, self.seq, self.resume_seq = path, seq, resume_seq
        after = (
            "nothing intact follows yet" if resume_seq is None else f"reading goes on at record {resume_seq}"
        )
        super().__init__(f"record {seq} in {path} is damaged ({why}); {after}. Check the disk.")


class SpoolMissing(SpoolError):
    """A record was asked for that has been deleted, because a server had acknowledged it.

    Attributes:
        seq: the record asked for.
        first_seq: the first one that is still here.
    """

    def __init__(self, directory: Path, *, seq: int, first_seq: int) -> None:
        self.seq, self.first_seq = seq, first_seq
        super().__init__(
            f"record {seq} is asked for, but {directory} begins at {first_seq}: a server acknowledged the earlier "
            "ones. Connect the server that holds them, or restore its database."
        )


class Ending(enum.Enum):
    """Why parsing stopped."""

    WHOLE = "the data ended with a record"
    SHORT = "the data ended inside a record"
    BAD = "a record failed its checks"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What `parse` found.

    Attributes:
        records: the payloads, in order.
        num_bytes: how much of the data they take, headers included.
        needed_bytes: with `SHORT`, how long the data must be at least to hold one more record; otherwise 0.
    """

    records: tuple[bytes, ...]
    num_bytes: int
    ending: Ending
    needed_bytes: int = 0


def pack(seq: int, payload: bytes) -> bytes:
    """One record as it stands in a segment."""
    return HEADER.pack(len(payload), checksum(seq, payload), seq) + payload


def checksum(seq: int, payload: bytes) -> int:
    """CRC-32 of the number and the payload, so that a record moved to another place does not pass."""
    return zlib.crc32(payload, zlib.crc32(_SEQ.pack(seq)))


def parse(data: bytes, seq: int) -> Parsed:
    """Read records number `seq`, `seq` + 1, ... from the start of `data`."""
    records: list[bytes] = []
    offset = 0

    def stop(ending: Ending, needed_bytes: int = 0) -> Parsed:
        return Parsed(records=tuple(records), num_bytes=offset, ending=ending, needed_bytes=needed_bytes)

    while offset < len(data):
        if len(data) - offset < HEADER.size:
            return stop(Ending.SHORT, offset + HEADER.size)
        length, crc, number = HEADER.unpack_from(data, offset)
        if number != seq or length > wire.MAX_RECORD_BYTES:
            return stop(Ending.BAD)
        end = offset + HEADER.size + length
        if end > len(data):
            return stop(Ending.SHORT, end)
        payload = data[offset + HEADER.size : end]
        if checksum(seq, payload) != crc:
            return stop(Ending.BAD)
        records.append(payload)
        offset, seq = end, seq + 1
    return stop(Ending.WHOLE)


def find_next(data: bytes, seq: int) -> tuple[int, int] | None:
    """After damage at record `seq`: the number and the offset in `data` of the next intact record, if there is one."""
    for number in range(seq + 1, seq + 1 + RESYNC_RECORDS):
        at = data.find(_SEQ.pack(number))
        while at >= 0:
            offset = at - (HEADER.size - _SEQ.size)
            if offset >= 0 and _holds(data, offset, number):
                return number, offset
            at = data.find(_SEQ.pack(number), at + 1)
    return None


def _holds(data: bytes, offset: int, seq: int) -> bool:
    length: int
    crc: int
    length, crc, _ = HEADER.unpack_from(data, offset)
    start = offset + HEADER.size
    return start + length <= len(data) and checksum(seq, data[start : start + length]) == crc


def segment_path(directory: Path, first_seq: int) -> Path:
    """Where the segment that begins with record `first_seq` lies."""
    return directory / f"{first_seq:08d}.seg"


def segments(directory: Path) -> list[tuple[int, Path]]:
    """First record and path of every segment of a source, in order; raises `FileNotFoundError` if it is gone."""
    found = [path for path in directory.iterdir() if path.suffix == ".seg" and path.stem.isdecimal()]
    return sorted((int(path.stem), path) for path in found)
