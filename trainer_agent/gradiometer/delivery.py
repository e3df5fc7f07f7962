"""The run's dealings with the node's uplink process: start it, wake it, and wait for it at the end."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Final

from gradiometer import last_words, spool, uplink
from gradiometer.guard import Guard
from gradiometer.last_words import LastWords
from gradiometer.settings import Settings
from gradiometer.uplink.state import read_state

_log: Final = logging.getLogger(__name__)

_ENSURE_EVERY_S: Final = 10.0
_ENSURE_SILENT_S: Final = 1.0
"""How long an uplink that cannot be woken is let be."""
_SHORTEST_START_S: Final = 1.0
_STARTS_AT_END: Final = 3
_LOOK_EVERY_S: Final = 3.0
_SENT_LATER: Final = " They are sent as soon as that is mended; `gradiometer sync` sends them too."


class Delivery:
    """What happens to records after they reached the spool. Offline: nothing.

    Args:
        writer: looked at for its place and its last number only.
    """

    def __init__(self, writer: spool.SpoolWriter, settings: Settings, *, rank: int, guard: Guard) -> None:
        self._writer = writer
        self._settings = settings
        self._rank = rank
        self._guard = guard
        self._online = settings.mode == "online"
        self._ensured_s = self._looked_s = 0.0
        self._told: set[str] = set()
        self._ensuring = threading.Lock()
        self.directory: Path = writer.directory

    def start(self) -> None:
        """Make sure that the node's uplink runs."""
        if self._online:
            self._ensured_s = self._looked_s = time.monotonic()
            self._guard.tolerate("uplink", self._ensure)

    def announce(self, run_id: str, url: str) -> None:
        """Say once for all ranks where the run can be seen."""
        if self._rank != 0:
            return
        where = url if self._online else f"offline, spool {self._writer.attempt_directory}"
        # Standard error may be closed, or a pipe that nobody reads.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"gradiometer: run {run_id} ({where})\n")

    def _ensure(self, patience_s: float = uplink.START_TIMEOUT_S) -> bool:
        with self._ensuring:
            try:
                uplink.ensure_running(
                    self._writer.attempt_directory,
                    url=self._settings.url,
                    token=self._settings.token,
                    patience_s=patience_s,
                )
            except uplink.UplinkError:
                # An uplink that has delivered everything removes the folder; the next one is not needed.
                if self.directory.is_dir():
                    raise
        return True

    def appended(self) -> None:
        """There may be more to send. Agent thread."""
        if not self._online:
            return
        silent = not uplink.wake(self._writer.attempt_directory)
        now_s = time.monotonic()
        if now_s - self._ensured_s > (_ENSURE_SILENT_S if silent else _ENSURE_EVERY_S):
            # Somebody may have killed it; the lock in the attempt's folder keeps a second one from starting.
            started = self._guard.tolerate("uplink", self._ensure)
            # One that cannot start is not tried again every second.
            self._ensured_s = time.monotonic() + (0.0 if started else _ENSURE_EVERY_S)
        if now_s - self._looked_s > _LOOK_EVERY_S:
            self._looked_s = now_s
            self._guard.tolerate("uplink", self._tell_trouble)

    def _tell_trouble(self) -> None:
        """Warn once of each thing that keeps the records here: the uplink itself has no terminal."""
        trouble = uplink.trouble(self._writer.attempt_directory)
        if trouble and trouble not in self._told:
            self._told.add(trouble)
            _log.warning(
                "gradiometer: not delivered yet: %s Training goes on; the records wait in the spool.", trouble
            )

    def leave(self, words: LastWords) -> bool:
        """The process ends by itself: leave it to the uplink to say how; False if there is none that would."""
        if not self._online:
            return False
        try:
            if not uplink.is_running(self._writer.attempt_directory):
                return False
            last_words.write(self.directory, words)
        except (OSError, spool.SpoolError):
            return False
        return True

    def finish(self, due_s: float) -> None:
        """Wait for the delivery of everything until `due_s` (monotonic), else say what remains."""
        if not self._online:
            return
        # Whoever looks after the uplink has just ended: from here on nobody else would start another one.
        if not any(self._delivered_by(due_s) for _ in range(_STARTS_AT_END)):
            self._tell_remaining()

    def _delivered_by(self, due_s: float) -> bool:
        """Make sure that there is an uplink, and wait for it; False, too, as soon as it is gone."""
        left_s = due_s - time.monotonic()
        if self._is_delivered():
            return True
        self._guard.tolerate("uplink", self._ensure, max(_SHORTEST_START_S, left_s))
        uplink.wake(self._writer.attempt_directory)
        asked = (self._writer.attempt_directory, self._rank, self._writer.seq, due_s - time.monotonic())
        return bool(self._guard.tolerate("uplink", uplink.wait_delivered, *asked))

    def _is_delivered(self) -> bool:
        # The uplink removes a folder when the server has all of it.
        return not self.directory.is_dir() or spool.read_acked(self.directory) >= self._writer.seq

    def _tell_remaining(self) -> None:
        trouble = self._guard.tolerate("uplink", uplink.trouble, self._writer.attempt_directory)
        state = read_state(self._writer.attempt_directory)
        # What the server will never take is not sent once something is mended; its own words say what to do.
        is_final = state is not None and state.state == "stopped"
        remaining = max(0, self._writer.seq - spool.read_acked(self.directory))
        _log.warning(
            "gradiometer: %d records are still in the spool at %s. %s%s",
            remaining,
            self.directory,
            trouble or f"{self._settings.url} has not taken them yet.",
            "" if is_final else _SENT_LATER,
        )
