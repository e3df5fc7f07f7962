"""What the server asks of a trainer, on its way from the uplink to the agent's thread: one small file per rank.

The uplink replaces the file; the agent's thread looks at it when it is awake anyway, at most once a second. A command
that is not understood is ignored. The commands of a run may come again (a reconnect, a POST): ids tell.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import msgspec

from gradiometer import wire
from gradiometer.spool import write_atomically

KINDS: Final = ("ring", "dump", "histogram")
"""What this agent understands; told to the server with every hello."""
FILE: Final = "commands"
MAX_COMMANDS: Final = 16
"""Kept in the file and remembered by both ends."""
_LOOK_EVERY_S: Final = 1.0

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[wire.Command, ...])


class Outbox:
    """The uplink's end: the last commands of one rank, oldest first."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path, self._rank = directory / FILE, rank
        self._commands: tuple[wire.Command, ...] = ()

    def put(self, command: wire.Command) -> bool:
        """Hand over a command; False if it is for others, known or not understood. Raises `OSError`."""
        if command.rank not in (None, self._rank) or command.kind not in KINDS:
            return False
        if any(known.id == command.id for known in self._commands):
            return False
        kept = (*self._commands, command)[-MAX_COMMANDS:]
        write_atomically(self._path, _encoder.encode(kept))
        self._commands = kept
        return True


class Inbox:
    """The trainer's end."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._looked_s = 0.0
        self._seen_file: tuple[int, int] | None = None
        self._seen_ids: list[str] = []

    def look(self, *, at_once: bool = False) -> list[wire.Command]:
        """Commands that are new; one `stat` at most once a second, unless `at_once`, while there are none. Never raises."""
        now_s = time.monotonic()
        if not at_once and now_s - self._looked_s < _LOOK_EVERY_S:
            return []
        self._looked_s = now_s
        try:
            status = self._path.stat()
            file = (status.st_mtime_ns, status.st_ino)
            if file == self._seen_file:
                return []
            commands = _decoder.decode(self._path.read_bytes())
        except (OSError, msgspec.DecodeError):
            return []
        self._seen_file = file
        new = [command for command in commands if command.id not in self._seen_ids]
        self._seen_ids = (self._seen_ids + [command.id for command in new])[-2 * MAX_COMMANDS :]
        return [command for command in new if command.kind in KINDS]
