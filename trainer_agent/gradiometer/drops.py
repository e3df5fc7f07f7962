"""Counts what the agent discards, by reason, so that nothing disappears silently."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Final

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Reports discarded for one reason since the last `take`."""

    reason: str
    count: int
    first_step: int | None
    last_step: int | None


class Drops:
    """Thread-safe counters. The lock is held for a few dictionary operations, never across I/O or a wait."""

    def __init__(self) -> None:
        # Reentrant, because a signal handler may close the run while its thread is counting here.
        self._lock = threading.RLock()
        self._totals: dict[str, int] = {}
        self._fresh: dict[str, Drop] = {}

    def add(self, reason: str, step: int | None, *, detail: str = "") -> None:
        """Count one discarded report; the first of each reason is logged with `detail`."""
        with self._lock:
            first = reason not in self._totals
            self._totals[reason] = self._totals.get(reason, 0) + 1
            old = self._fresh.get(reason)
            self._fresh[reason] = _merged(old, reason, step)
        if first:
            _log.warning(
                "gradiometer: dropped a report: %s%s. Further ones are only counted (run.dropped).",
                reason,
                f" ({detail})" if detail else "",
            )

    @property
    def totals(self) -> dict[str, int]:
        """Number of discarded reports by reason, since the start."""
        with self._lock:
            return dict(self._totals)

    def take(self) -> list[Drop]:
        """What was not taken before."""
        with self._lock:
            taken, self._fresh = list(self._fresh.values()), {}
        return taken

    def give_back(self, drops: list[Drop]) -> None:
        """What was taken could not be told: keep it for the next time."""
        with self._lock:
            for drop in drops:
                newer = self._fresh.get(drop.reason)
                self._fresh[drop.reason] = drop if newer is None else _joined(drop, newer)


def _merged(old: Drop | None, reason: str, step: int | None) -> Drop:
    fresh = Drop(reason=reason, count=1, first_step=step, last_step=step)
    return fresh if old is None else _joined(old, fresh)


def _joined(old: Drop, new: Drop) -> Drop:
    steps = [s for s in (old.first_step, old.last_step, new.first_step, new.last_step) if s is not None]
    return Drop(
        reason=old.reason,
        count=old.count + new.count,
        first_step=min(steps) if steps else None,
        last_step=max(steps) if steps else None,
    )
