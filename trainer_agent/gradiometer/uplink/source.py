"""One rank as its uplink sees it: its spool, whether its trainer lives, and the last word about how it ended."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from pathlib import Path
from typing import Final

from gradiometer import spool, wire
from gradiometer.commands import Outbox
from gradiometer.spool import SpoolCorrupt, SpoolWriter
from gradiometer.spool_reader import SpoolReader, Tail
from gradiometer.uplink.death import TrainerWatch
from gradiometer.uplink.session import Request

logger = logging.getLogger(__name__)

_DAMAGE_PATIENCE_S: Final = 1.0
_FOREIGN_QUIET_S: Final = 60.0
_EVENT_MARK: Final = b"\xa4type\xa5event"
"""How msgpack begins an event: the tag is the first field."""


class Source:
    """One rank's folder. Only the uplink's event loop uses it. Raises `SpoolError` if its files cannot be read."""

    def __init__(self, directory: Path) -> None:
        file = spool.read_source(directory)
        self.directory = directory
        self.info: wire.SourceInfo = file.source
        self.outbox = Outbox(directory, self.info.rank)
        self.acked_seq = spool.read_acked(directory)
        self.num_rejected = 0
        self.closed = False
        self._written_acked_seq = self.acked_seq
        self._reader = SpoolReader(directory)
        self._tail = Tail(directory)
        self._checked_seq = 0
        self._damage_seen: tuple[int, float] | None = None
        # A pid means something on its own machine only; a spool may have been copied here, or lie on a shared disk.
        self.is_local = file.hostname == socket.gethostname()
        self.hostname = file.hostname
        self.watch = self._watch(file) if self.is_local else None
        self._was_alive = self.alive()

    def _watch(self, file: spool.SourceFile) -> TrainerWatch:
        return TrainerWatch(pid=file.pid, start=file.process_start, directory=self.directory)

    @property
    def rank(self) -> int:
        """Which rank writes here."""
        return self.info.rank

    @property
    def spooled_seq(self) -> int:
        """Last record in the spool, as of the last `look`."""
        return max(self._tail.seq, self.acked_seq)

    @property
    def delivered(self) -> bool:
        """Whether the server has every record that was in the spool at the last `look`."""
        return self.acked_seq >= self._tail.seq

    def alive(self) -> bool:
        """Whether the trainer runs; of a trainer on another machine, whether it wrote in the last minute."""
        if self.watch is not None:
            return self.watch.alive()
        path = self._tail.path
        with contextlib.suppress(OSError):
            return path is not None and time.time() - path.stat().st_mtime < _FOREIGN_QUIET_S
        return False

    def look(self) -> bool:
        """See what the trainer wrote and whether it ended; True if there is something new. Raises `SpoolError`."""
        before = self._tail.seq
        # Asked before reading: what a trainer wrote last is then seen before its death is.
        alive = self.alive()
        try:
            self._tail.advance()
            if not self.closed and self._checked_seq != self._tail.seq:
                self._checked_seq = self._tail.seq
                self.closed = is_exit(self._tail.last_record())
        except OSError as error:
            raise spool.SpoolError(f"cannot read {self.directory}: {error.strerror or error}.") from error
        if not alive and not self.closed and self.watch is not None:
            self._append_ending(self.watch)
        return self._tail.seq != before

    def _append_ending(self, watch: TrainerWatch) -> None:
        ending = watch.ending()
        event = wire.Event(kind="exit", time=time.time(), attributes=ending.attributes())
        writer = SpoolWriter(self.directory, acked_seq=self.acked_seq)
        try:
            seq = writer.append(wire.encode(event), essential=True)
        finally:
            writer.close()
        logger.info("rank %d ended: %s; recorded as record %d", self.rank, ending.reason, seq)
        self._tail.advance()
        self._checked_seq, self.closed = seq, True

    def read(self, request: Request) -> list[bytes]:
        """What the session asked for; damaged records are replaced by events that say so. Raises `SpoolError`."""
        try:
            return self._reader.read(request.first_seq, request.max_bytes)
        except SpoolCorrupt as damage:
            return self._replace(damage)

    def _replace(self, damage: SpoolCorrupt) -> list[bytes]:
        now_s = time.monotonic()
        if self._damage_seen is None or self._damage_seen[0] != damage.seq:
            self._damage_seen = (damage.seq, now_s)
        # On some file systems a record shows its length a moment before its content.
        if damage.resume_seq is None or now_s - self._damage_seen[1] < _DAMAGE_PATIENCE_S:
            return []
        logger.error("%s", damage)
        num_lost = damage.resume_seq - damage.seq
        attributes = {"reports": 1, "reason": str(damage), "first_step": None, "last_step": None}
        return [wire.encode(wire.Event(kind="dropped", time=time.time(), attributes=attributes))] * num_lost

    def acknowledge(self, seq: int) -> None:
        """The server has everything up to `seq`, and no more."""
        self.acked_seq = seq

    def flush(self) -> None:
        """Write the acknowledgement down and delete what it makes superfluous. Raises `OSError`."""
        if self.acked_seq != self._written_acked_seq:
            spool.write_atomically(self.directory / "acked", b"%d\n" % self.acked_seq)
            self._written_acked_seq = self.acked_seq
            self._reader.delete_acknowledged(self.acked_seq)

    def status(self) -> wire.SourceStatus:
        """For the heartbeat."""
        return wire.SourceStatus(
            rank=self.rank,
            attempt=self.info.attempt,
            alive=not self.closed and self.alive(),
            spooled_seq=self.spooled_seq,
            spooled_bytes=self.stored_bytes(),
        )

    def stored_bytes(self) -> int:
        """Size of the segments on disk."""
        with contextlib.suppress(OSError):
            return sum(path.stat().st_size for path in self.directory.glob("*.seg"))
        return 0

    def close(self) -> None:
        """Close files; the folder stays."""
        self._reader.close()
        if self.watch is not None:
            self.watch.close()


def is_exit(record: bytes | None) -> bool:
    """Whether this record closes its source."""
    if record is None or _EVENT_MARK not in record[:16]:
        return False
    try:
        decoded = wire.decode_record(record)
    except wire.WireError:
        return False
    return isinstance(decoded, wire.Event) and decoded.kind == "exit"
