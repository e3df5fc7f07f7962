"""Up to which step the ranks of one attempt have reported: pure, told the time by its caller.

Two bounds, both exclusive:

* `emit_below`: no rank that is still heard of will report a step below it; what is there can be shown;
* `final_below`: every rank of the world has been seen and is past it or closed; nothing more is expected at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

NO_BOUND: Final = 2**62
"""Above every step: no rank holds the watermark back."""


@dataclass(slots=True)
class _Rank:
    """What is known of one rank: its largest step, when it was last heard of, whether it has ended."""

    last_step: int
    heard_s: float
    closed: bool = False


class Watermark:
    """Tracks the ranks of one attempt.

    A rank that was never seen is waited for during `silence_s` after the first word of the attempt: ranks of one
    launch connect within seconds of each other, and a merge without the slow starters would be wrong for no gain.
    """

    def __init__(self, *, world_size: int, silence_s: float) -> None:
        self._world_size, self._silence_s = world_size, silence_s
        self._ranks: dict[int, _Rank] = {}
        self._began_s: float | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the launch, as its sources declare it; the largest word counts."""
        return self._world_size

    def expect(self, world_size: int) -> None:
        """Take in what one more source says about the size of the world."""
        self._world_size = max(self._world_size, world_size)

    def heard(self, rank: int, now_s: float, *, step: int = -1) -> None:
        """`rank` said something at `now_s` (monotonic seconds); `step` if it reported one."""
        if self._began_s is None:
            self._began_s = now_s
        known = self._ranks.get(rank)
        if known is None:
            self._ranks[rank] = _Rank(last_step=step, heard_s=now_s)
            return
        known.heard_s = max(known.heard_s, now_s)
        known.last_step = max(known.last_step, step)

    def close(self, rank: int, now_s: float) -> None:
        """`rank` has ended: nothing more comes from it."""
        self.heard(rank, now_s)
        self._ranks[rank].closed = True

    def emit_below(self, now_s: float, progress: Mapping[int, int]) -> int:
        """Steps below this were passed by every live rank at `now_s`; a closed or silent rank holds nobody back.

        `progress` overrides the largest step of the ranks that it names: how far they are with one metric.
        """
        if self._began_s is None:
            return 0
        if len(self._ranks) < self._world_size and now_s - self._began_s < self._silence_s:
            return 0
        return self._lowest(
            progress, [rank for rank, state in self._ranks.items() if not self._silent(state, now_s)]
        )

    def final_below(self, progress: Mapping[int, int]) -> int:
        """Steps below this can get no further report, however late: every rank was seen and is past or closed."""
        if len(self._ranks) < self._world_size:
            return 0
        return self._lowest(progress, list(self._ranks))

    def _lowest(self, progress: Mapping[int, int], ranks: list[int]) -> int:
        steps = (progress.get(r, self._ranks[r].last_step) for r in ranks if not self._ranks[r].closed)
        return min(steps, default=NO_BOUND)

    def all_closed(self) -> bool:
        """Every rank of the world was seen and has ended."""
        return len(self._ranks) >= self._world_size and all(r.closed for r in self._ranks.values())

    def _silent(self, rank: _Rank, now_s: float) -> bool:
        return now_s - rank.heard_s >= self._silence_s
