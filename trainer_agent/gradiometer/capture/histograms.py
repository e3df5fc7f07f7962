"""Histograms of log2 magnitude of one step, on their way to the agent's thread; what a bin is says `capture.native`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gradiometer import wire
from gradiometer.capture.backends import Blocks
from gradiometer.capture.native import NUM_BINS
from gradiometer.capture.readback import Readback
from gradiometer.capture.statistics import Floats
from gradiometer.histograms import Wish

assert NUM_BINS == wire.HISTOGRAM_BINS
_NOT_FINITE: Final = NUM_BINS - 1


class NotCountable(ValueError):
    """Counts that cannot be sent as what they are; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """One step's counts.

    Attributes:
        wish: why they were taken.
        parts: rows of the layout and their counts, and the loss scale that those gradients were multiplied by.
    """

    wish: Wish
    parts: tuple[tuple[Blocks, Readback | None], ...]

    def counts(self, num_layers: int, scale: Readback | None) -> Floats:
        """Shape (layers, 256), of unscaled gradients; agent thread only. `scale`: of parts that have none of their own.

        Raises:
            NotCountable: the loss scale is no power of two.
        """
        counts = np.zeros((num_layers, NUM_BINS))
        for blocks, own in self.parts:
            found = scale if own is None else own
            factor = 1.0 if found is None else float(found.values().ravel()[0])
            for rows, readback in blocks:
                counts[rows] = unscaled(readback.values(), factor)
        return counts


def joined(pieces: Sequence[tuple[Histogram | None, Readback | None]]) -> Histogram | None:
    """One step's histogram of what was taken for several optimizers, each with the loss scale of its gradients."""
    taken = [(histogram, scale) for histogram, scale in pieces if histogram is not None]
    if not taken:
        return None
    parts = [(blocks, scale) for histogram, scale in taken for blocks, _ in histogram.parts]
    return Histogram(wish=taken[0][0].wish, parts=tuple(parts))


def unscaled(counts: Floats, scale: float) -> Floats:
    """Counts (rows, 256) of gradients divided by the loss scale, from those of gradients multiplied by it.

    Division by 2**k moves an element by k bins. What falls below float32's normal range, as most of bin 0 is, lies in
    bin 0, which is exact for k >= 0; for a scale below 1, bin 0 keeps what might have come out of it. Bin 255 stays.

    Raises:
        NotCountable: the scale is no power of two, so that each bin would have to be divided between two.
    """
    if scale == 1.0:
        return counts
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5:
        raise NotCountable(
            f"the loss scale {scale:g} is no power of two, so bins of log2 magnitude cannot be unscaled"
        )
    shift = exponent - 1
    target = np.clip(np.arange(NUM_BINS) - shift, 0, _NOT_FINITE - 1)
    target[0], target[_NOT_FINITE] = 0, _NOT_FINITE
    moved = np.zeros_like(counts)
    for source in range(NUM_BINS):
        moved[:, target[source]] += counts[:, source]
    return moved


def packed(counts: Floats) -> bytes:
    """As `wire.Detail` carries them.

    Raises:
        NotCountable: a bin of one layer holds more elements than 32 bits count.
    """
    if counts.size and float(counts.max()) >= 2**32:
        raise NotCountable("a rank holds more than 2**32 elements of one layer in one bin")
    return counts.astype("<u4").tobytes()
