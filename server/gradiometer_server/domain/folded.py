"""What the fold hands on: merged values of one step, to the store, the alert rules and the live feed alike.

Shape letters: L layers, R ranks, S steps, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYER_STATISTICS = ("norm", "rms", "mean", "std", "abs_max", "zero_fraction", "num_nonfinite")
"""Derived layer statistics, in the order in which they are stored and offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedScalars:
    """Scalars of one step, merged over ranks. One step may come in several of these (one per `log` call).

    Attributes:
        attempt: ordinal of the attempt, from 1.
        values: merged value by metric name (NaN and infinities as they are).
        by_rank: only when more than one rank reported a metric: its value on each rank.
        time_s: Unix seconds, of the first rank that reported.
    """

    attempt: int
    step: int
    time_s: float
    values: Mapping[str, float]
    by_rank: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedBlock:
    """Scalars of many steps of a run of one rank at once: a `FoldedScalars` of each step, by rising step.

    Attributes:
        attempt: ordinal of the attempt, from 1.
        steps_S: int64; times_S: float64, Unix seconds.
        values_SC: float64, one column for each of `names`.
    """

    attempt: int
    names: tuple[str, ...]
    steps_S: NDArray[np.int64]
    times_S: NDArray[np.float64]
    values_SC: NDArray[np.float64]

    def at(self, row: int) -> FoldedScalars:
        """What it says of one step."""
        values = dict(zip(self.names, self.values_SC[row].tolist(), strict=True))
        return FoldedScalars(
            attempt=self.attempt, step=int(self.steps_S[row]), time_s=float(self.times_S[row]), values=values
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layers that a run reports, in depth order (`named_parameters` order: input side first)."""

    layout_id: int
    names: tuple[str, ...]
    numels: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMismatch:
    """Two ranks hold one shard but their gradients differ: (layer, ranks, sums of squares)."""

    layer: str
    ranks: tuple[int, int]
    sum_squares: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedLayers:
    """Layer statistics of one step, merged exactly over all shards.

    Attributes:
        statistics: by name (`LAYER_STATISTICS`), float64 of shape (L,); `domain.absent.ABSENT` where a layer had no
            gradient, or where not all that hold a part of it measured what the statistic needs. One that nobody
            measured in this step is left out; norm, rms and num_nonfinite are always there.
        num_nonfinite_by_rank: rank -> int64 of shape (L,), for ranks with any non-finite element.
        expected: number of (layer, shard) pairs that report when everybody does; `seen`: that did.
        coverage: elements told over elements that there are; 1: all.
        withheld: bool of shape (L,): layers of which not all was told; their statistics are `ABSENT` unless no missing
            part could change them. None: there is no such layer.
        num_incomplete: how many of them lack a part that a rank did not tell, or do not add up; the others cannot be
            read where they are.
        missing_ranks: ranks of the world that told nothing of this step.
        mismatch: the first pair of replicas that disagree.
    """

    attempt: int
    step: int
    time_s: float
    layout: Layout
    statistics: Mapping[str, NDArray[np.float64]]
    num_nonfinite_by_rank: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    expected: int = 0
    seen: int = 0
    coverage: float = 1.0
    withheld: NDArray[np.bool_] | None = None
    num_incomplete: int = 0
    missing_ranks: tuple[int, ...] = ()
    mismatch: ReplicaMismatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedEvent:
    """An agent's event with its place: see `gradiometer.wire.Event` for kinds and attributes."""

    attempt: int
    rank: int
    kind: str
    time_s: float
    step: int | None
    attributes: Mapping[str, Any]


FoldedStep = FoldedScalars | FoldedLayers | FoldedEvent
"""What is judged: one step, or an event."""

Folded = FoldedStep | FoldedBlock
