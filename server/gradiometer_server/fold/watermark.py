"""Up to which step the ranks of one attempt have reported: pure, told the time by its caller.

Two bounds, both exclusive:

* `emit_below`: no rank that is still heard of will report a step below it; what is there can be shown;
* `final_below`: every rank of the world has been seen and is past it or closed; nothing more is expected at all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

NO_BOUND: Final = 2**62
"""Above every step: no rank holds the watermark back."""


@dataclass(slots=True, kw_only=True)
class Bound:
    """A bound and what it rests on, so that it need not be sought again at every word of a thousand ranks.

    Attributes:
        below: the bound, exclusive.
        holders: ranks that are exactly there; while one of them is and nobody joins or leaves, the bound stands.
        until_s: when a rank may fall silent (monotonic seconds).
        version: `Watermark.version` at that time.
    """

    below: int
    holders: set[int]
    until_s: float
    version: int


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
        self.version = 0
        """Counts what changes who is waited for, but for the passing of time."""

    @property
    def world_size(self) -> int:
        """Ranks of the launch, as its sources declare it; the largest word counts."""
        return self._world_size

    def expect(self, world_size: int) -> None:
        """Take in what one more source says about the size of the world."""
        if world_size > self._world_size:
            self._world_size = world_size
            self.version += 1

    def heard(self, rank: int, now_s: float, *, step: int = -1) -> None:
        """`rank` said something at `now_s` (monotonic seconds); `step` if it reported one."""
        if self._began_s is None:
            self._began_s = now_s
        known = self._ranks.get(rank)
        if known is None:
            self._ranks[rank] = _Rank(last_step=step, heard_s=now_s)
            self.version += 1
            return
        if self._silent(known, now_s):
            self.version += 1
        known.heard_s = max(known.heard_s, now_s)
        known.last_step = max(known.last_step, step)

    def close(self, rank: int, now_s: float) -> None:
        """`rank` has ended: nothing more comes from it."""
        self.heard(rank, now_s)
        self._ranks[rank].closed = True
        self.version += 1

    def last_step(self, rank: int) -> int:
        """Largest step of a rank that was heard of; -1 before its first one."""
        return self._ranks[rank].last_step

    def emit_below(self, now_s: float, progress: Mapping[int, int]) -> int:
        """Steps below this were passed by every live rank at `now_s`; a closed or silent rank holds nobody back.

        `progress` overrides the largest step of the ranks that it names: how far they are with one metric.
        """
        return self.emit_bound(now_s, progress).below

    def emit_bound(self, now_s: float, progress: Mapping[int, int]) -> Bound:
        """`emit_below`, with what it rests on."""
        if self._began_s is None:
            return self._bound(0, set(), -math.inf)
        begun_s = self._began_s + self._silence_s
        if len(self._ranks) < self._world_size and now_s - self._began_s < self._silence_s:
            return self._bound(0, set(), begun_s)
        live = [
            rank for rank, state in self._ranks.items() if not state.closed and not self._silent(state, now_s)
        ]
        until_s = min((self._ranks[rank].heard_s for rank in live), default=math.inf) + self._silence_s
        return self._lowest(progress, live, until_s)

    def final_below(self, progress: Mapping[int, int]) -> int:
        """Steps below this can get no further report, however late: every rank was seen and is past or closed."""
        return self.final_bound(progress).below

    def final_bound(self, progress: Mapping[int, int]) -> Bound:
        """`final_below`, with what it rests on."""
        if len(self._ranks) < self._world_size:
            return self._bound(0, set(), math.inf)
        return self._lowest(progress, [r for r, state in self._ranks.items() if not state.closed], math.inf)

    def _lowest(self, progress: Mapping[int, int], ranks: list[int], until_s: float) -> Bound:
        steps = {rank: progress.get(rank, self._ranks[rank].last_step) for rank in ranks}
        below = min(steps.values(), default=NO_BOUND)
        return self._bound(below, {rank for rank, step in steps.items() if step == below}, until_s)

    def _bound(self, below: int, holders: set[int], until_s: float) -> Bound:
        return Bound(below=below, holders=holders, until_s=until_s, version=self.version)

    def all_closed(self) -> bool:
        """Every rank of the world was seen and has ended."""
        return len(self._ranks) >= self._world_size and all(r.closed for r in self._ranks.values())

    def _silent(self, rank: _Rank, now_s: float) -> bool:
        return now_s - rank.heard_s >= self._silence_s


class KeptBound:
    """A bound of a watermark that is sought again only when it may have moved.

    It stands while one of the ranks that are exactly there still is, and nobody joins, ends, falls silent or comes back.
    So a step of a thousand ranks costs one look at all of them, not a thousand.
    """

    def __init__(self, *, is_final: bool = False) -> None:
        self._is_final = is_final
        self._bound: Bound | None = None
        self._num_declared = 0

    def below(
        self,
        mark: Watermark,
        now_s: float,
        declared: Collection[int] = (),
        last_step: Mapping[int, int] = MappingProxyType({}),
    ) -> int:
        """`emit_below` or `final_below`, where the ranks that `declared` something are as far as they are with it."""
        if self._bound is None or not self._stands(self._bound, mark, now_s, declared, last_step):
            progress = {rank: last_step.get(rank, -1) for rank in declared}
            self._bound = mark.final_bound(progress) if self._is_final else mark.emit_bound(now_s, progress)
            self._num_declared = len(declared)
        return self._bound.below

    def _stands(
        self,
        bound: Bound,
        mark: Watermark,
        now_s: float,
        declared: Collection[int],
        last_step: Mapping[int, int],
    ) -> bool:
        if bound.version != mark.version or now_s >= bound.until_s or self._num_declared != len(declared):
            return False
        if not bound.holders:
            return True
        while bound.holders:
            rank = next(iter(bound.holders))
            step = last_step.get(rank, -1) if rank in declared else mark.last_step(rank)
            if step == bound.below:
                return True
            bound.holders.discard(rank)
        return False
