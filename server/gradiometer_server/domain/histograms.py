"""Histograms of log2 magnitude: what a rank sent, what the bins are, and the exact sum over ranks. Pure.

Bin 0 counts |g| < 2**-126, zeros among them; bin b in 1..254 counts 2**(b-127) <= |g| < 2**(b-126); bin 255 counts
infinities and NaN. Shape letters: N steps, L layers of one rank, B bins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer import wire

Counts = NDArray[np.int64]

EDGES: Final = (0.0, *(2.0 ** (bin - 127) for bin in range(1, wire.HISTOGRAM_BINS)))
"""Bin b of the finite ones, 0..254, goes from EDGES[b] up to, but without, EDGES[b + 1]."""


def counts_of(detail: wire.Detail) -> NDArray[np.uint32]:
    """The counts of a histogram record, shape (N, L, B)."""
    counts = np.frombuffer(detail.values, dtype=np.dtype("<u4"))
    return counts.reshape(len(detail.steps), -1, wire.HISTOGRAM_BINS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHistograms:
    """What one rank sent of one step: a row of counts for each layer of a schema, (L, B)."""

    rank: int
    schema: wire.LayerSchema
    counts_LB: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHistogram:
    """One layer, over ranks: its elements in all, and counts (B,) of those that were reported."""

    name: str
    numel: int
    counts_B: Counts


def merged(parts: Iterable[RankHistograms]) -> list[LayerHistogram]:
    """The sum over shards, in the depth order of the lowest rank; equal copies of a shard count once.

    As `fold.ranks` merges statistics: a (layer, shard) belongs to the lowest rank that reports it.
    """
    found: dict[str, LayerHistogram] = {}
    owned: set[tuple[str, tuple[int, ...]]] = set()
    for part in sorted(parts, key=lambda part: (part.rank, part.schema.schema_id)):
        for row, layer in enumerate(part.schema.layers):
            held = found.get(layer.name)
            if held is None:
                empty_B = np.zeros(wire.HISTOGRAM_BINS, dtype=np.int64)
                held = found[layer.name] = LayerHistogram(
                    name=layer.name, numel=layer.numel, counts_B=empty_B
                )
            if (layer.name, layer.shard) not in owned:
                owned.add((layer.name, layer.shard))
                held.counts_B[:] += part.counts_LB[row]
    return list(found.values())
