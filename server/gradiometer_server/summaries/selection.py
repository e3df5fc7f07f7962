"""Chooses what a chart shows: how wide its buckets are, and which chunks can be answered from their summaries.

Shape letters: N points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.summaries.partition import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk(Span):
    """A chunk as selection sees it, with the width of its summary windows in steps."""

    summary_width: int


class ChunkLike(Protocol):
    """What selection looks at: a `StoredChunk`, or the row of one."""

    @property
    def step0(self) -> int: ...
    @property
    def step1(self) -> int: ...
    @property
    def summary_width(self) -> int: ...


def display_width(first: int, last: int, most_buckets: int) -> int:
    """The smallest power of two whose aligned buckets over first..last (inclusive) number at most `most_buckets`."""
    if most_buckets < 1:
        raise ValueError(f"cannot show anything in {most_buckets} buckets")
    shift = max(0, ((last - first + 1) // most_buckets).bit_length() - 2)
    while (last >> shift) - (first >> shift) + 1 > most_buckets:
        # One bucket cannot hold a range that crosses every alignment; the smallest that can is the whole range.
        shift += 1
    return 1 << shift


def needs_points(
    chunk: ChunkLike, *, first: int, last: int, width: int, tail_steps_N: NDArray[np.int64]
) -> bool:
    """Whether the chunk's points must be decoded, because its summary cannot answer exactly.

    So it is when its windows are wider than the buckets, when the range cuts it, or when a step that is not yet in a
    chunk (`tail_steps_N`, rising) falls into it and may replace one of its points.
    """
    if chunk.summary_width > width or chunk.step0 < first or chunk.step1 > last:
        return True
    if not len(tail_steps_N):
        return False
    begin, end = np.searchsorted(tail_steps_N, [chunk.step0, chunk.step1 + 1])
    return bool(begin < end)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """An attempt as the cut sees it: its ordinal, launch, declared first step and the first step it reported."""

    ordinal: int
    launch: int
    start_step: int
    first_reported: int | None


def attempt_cuts(attempts: Sequence[AttemptSpan]) -> dict[int, int | None]:
    """By ordinal: the step at which an attempt's line ends (exclusive), because a later launch took over; None: never.

    A later launch takes over after its `start_step`, the number of steps that were complete before it; in a series in
    which it speaks of that step, or of earlier ones, the caller cuts there. One that declares none (0) takes over at the
    first step that it reported: it may have resumed from a checkpoint without saying so, and cannot speak for the
    steps before.
    """
    cuts: dict[int, int | None] = {}
    cut: int | None = None
    for attempt in sorted(attempts, key=lambda one: one.launch, reverse=True):
        cuts[attempt.ordinal] = cut
        begin = attempt.start_step + 1 if attempt.start_step > 0 else attempt.first_reported
        if begin is not None:
            cut = begin if cut is None else min(cut, begin)
    return cuts
