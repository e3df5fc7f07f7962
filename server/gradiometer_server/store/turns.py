"""Who writes next: one writer at a time, in two classes that take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WriteTurns:
    """A lock for the only writer. Not reentrant.

    Agents wait for the log's commits, nobody for a flush. So an urgent writer goes before all others that wait, but
    not twice in a row: it then waits for one other at most, and a flood of commits does not keep the others out.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_held = False
        self._was_urgent = False
        self._num_waiting = {True: 0, False: 0}

    @contextmanager
    def turn(self, *, urgent: bool) -> Iterator[None]:
        """Wait for the turn, and have it."""
        with self._changed:
            self._num_waiting[urgent] += 1
            try:
                self._changed.wait_for(lambda: not self._is_held and not self._gives_way(urgent))
                self._is_held, self._was_urgent = True, urgent
            finally:
                self._num_waiting[urgent] -= 1
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def _gives_way(self, urgent: bool) -> bool:
        return self._was_urgent == urgent and self._num_waiting[not urgent] > 0
