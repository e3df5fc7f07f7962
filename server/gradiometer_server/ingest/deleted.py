"""Which runs were deleted while this process runs, so that connections that are open already learn of it at once."""

from __future__ import annotations

import threading


class DeletedRuns:
    """How often each run was deleted: an id may be used anew by a later launch, and deleted again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[int, int] = {}

    def note(self, run_key: int) -> None:
        """The run with this storage key is gone."""
        with self._lock:
            self._times[run_key] = self._times.get(run_key, 0) + 1

    def times(self, run_key: int) -> int:
        """How often it was deleted so far; whoever saw another number belongs to an earlier run."""
        return self._times.get(run_key, 0)
