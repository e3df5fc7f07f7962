"""Where a series is cut into chunks: a function of its set of steps alone, whatever the order of their arrival.

A chunk holds the points of one *dyadic* interval of steps, [i * 2^k, (i + 1) * 2^k): the largest ones that hold at most
`capacity` points. Points are only ever added, so intervals only ever split; a late step therefore touches one chunk,
and a replay of the same points, in any portions, ends with the same chunks, byte for byte.

Shape letters: N points, M points of one part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MAX_CHUNK_VALUES: Final = 65536
_MIN_POINTS: Final = 64
_MAX_POINTS: Final = 4096
ROOT_SHIFT: Final = 53
"""The interval that holds every step: they are below 2**53."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An existing chunk as the partition sees it: its first and last step and its number of points."""

    step0: int
    step1: int
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """New steps begin..end that fall into one dyadic interval of 2**shift steps; `span`: the chunk that is there."""

    span: int | None
    shift: int
    begin: int
    end: int


def chunk_capacity(width: int) -> int:
    """Points that a chunk of a series of `width` columns holds: a power of two from 64 to 4096, 65,536 values if possible.

    Measured: larger blocks compress no better, smaller ones cost rows.
    """
    return min(_MAX_POINTS, max(_MIN_POINTS, 1 << (max(1, _MAX_CHUNK_VALUES // width).bit_length() - 1)))


def split(steps_N: NDArray[np.int64], capacity: int, *, shift: int) -> list[slice]:
    """Cut the rising steps of one dyadic interval of 2**shift steps into chunks, in order."""
    if len(steps_N) == 0:
        return []
    if len(steps_N) <= capacity:
        return [slice(0, len(steps_N))]
    half = shift - 1
    middle = ((int(steps_N[0]) >> shift) << shift) + (1 << half)
    cut = int(np.searchsorted(steps_N, middle))
    left = split(steps_N[:cut], capacity, shift=half)
    right = split(steps_N[cut:], capacity, shift=half)
    return left + [slice(part.start + cut, part.stop + cut) for part in right]


def place(spans: Sequence[Span], steps_N: NDArray[np.int64], *, closed: Collection[int] = ()) -> list[Part]:
    """Which chunk's interval takes each of the rising new steps, or which empty interval, in order.

    `spans` are consecutive chunks, rising, up to the last one of the series. Where the series has earlier chunks that
    are not among them, the first two spans must begin at or before the first new step. Spans that begin at `closed` take
    no points in; no step may lie inside one.
    """
    begins = np.fromiter((span.step0 for span in spans), np.int64, len(spans))
    parts: list[Part] = []
    begin = 0
    while begin < len(steps_N):
        step = int(steps_N[begin])
        after = int(np.searchsorted(begins, step, side="right"))
        span, shift = _interval(spans, step, after, closed)
        high = ((step >> shift) + 1) << shift
        end = int(np.searchsorted(steps_N, high))
        parts.append(Part(span=span, shift=shift, begin=begin, end=end))
        begin = end
    return parts


def outside(steps_N: NDArray[np.int64], spans: Sequence[Span], closed: Collection[int]) -> NDArray[np.bool_]:
    """Which of the steps (N,) lie in none of the spans that begin at `closed`."""
    kept_N = np.ones(len(steps_N), np.bool_)
    for span in spans:
        if span.step0 in closed:
            kept_N &= (steps_N < span.step0) | (steps_N > span.step1)
    return kept_N


def _interval(
    spans: Sequence[Span], step: int, after: int, closed: Collection[int]
) -> tuple[int | None, int]:
    for index in (after - 1, after):
        if 0 <= index < len(spans) and spans[index].step0 not in closed:
            shift = _free_shift(spans, index - 1, index + 1, spans[index].step0, spans[index].step1)
            if step >> shift == spans[index].step0 >> shift:
                return index, shift
    return None, _free_shift(spans, after - 1, after, step, step)


def _free_shift(spans: Sequence[Span], left: int, right: int, first: int, last: int) -> int:
    """log2 of the largest dyadic interval around first..last that holds no point of the spans left and right."""
    shift = ROOT_SHIFT
    if left >= 0:
        shift = min(shift, (spans[left].step1 ^ first).bit_length() - 1)
    if right < len(spans):
        shift = min(shift, (spans[right].step0 ^ last).bit_length() - 1)
    return shift


def last_wins(steps_N: NDArray[np.int64], values_NW: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Points by rising step; of a repeated step the later entry stays."""
    if (steps_N[1:] > steps_N[:-1]).all():
        return steps_N, values_NW
    order = np.argsort(steps_N, kind="stable")
    ordered = steps_N[order]
    keep = np.append(ordered[1:] != ordered[:-1], True)
    return ordered[keep], values_NW[order[keep]]
