"""Exact merging of what the ranks of one step report; the result does not depend on their order of arrival. Pure.

Shape letters: L layers of one rank, M layers of the merged layout, P partial statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer.wire import STATISTICS, Layer, LayerSchema
from gradiometer_server.domain.folded import ReplicaMismatch
from gradiometer_server.fold.alike import IDENTITY, AlikeRanks, Writer
from gradiometer_server.fold.derive import (
    ALL,
    COUNT,
    EVERYTHING,
    MAX,
    MIN,
    NUM_NONFINITE,
    SUM_SQUARES,
    Measured,
)

REPLICA_TOLERANCE: Final = 1e-6
"""Relative difference of two replicas' sums of squares beyond which they no longer hold the same gradient."""


def measured_columns(statistics: Sequence[str]) -> tuple[int, ...]:
    """Places in a full partial of the statistics that a schema names."""
    return tuple(STATISTICS.index(name) for name in statistics)


def widened(schema: LayerSchema, partials_LK: NDArray[np.float64]) -> NDArray[np.float64]:
    """Partials of a schema in all columns (L, P): those that it does not measure hold what changes no merge."""
    if schema.statistics == STATISTICS:
        return partials_LK
    partials_LP = np.tile(IDENTITY, (len(schema.layers), 1))
    partials_LP[:, measured_columns(schema.statistics)] = partials_LK
    return partials_LP


def merge_scalar(by_rank: Mapping[int, float], merge: str) -> float:
    """Combine one metric over ranks in float64, in the order of the ranks.

    A NaN on any rank makes the merged value NaN: a rank in trouble must not be averaged away, nor hidden by
    `min` and `max` whose Python versions depend on the order.
    """
    values = [by_rank[rank] for rank in sorted(by_rank)]
    if len(values) == 1:
        return values[0]
    nan = next((value for value in values if math.isnan(value)), None)
    if nan is not None:
        return nan
    if merge == "min":
        return min(values)
    if merge == "max":
        return max(values)
    total = 0.0
    for value in values:
        total += value
    return total if merge == "sum" else total / len(values)


def merged_layers(schemas: Mapping[Writer, LayerSchema]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Union of all layers as (names, element counts): depth order of the lowest rank, others appended."""
    numels: dict[str, int] = {}
    for writer in sorted(schemas):
        for layer in schemas[writer].layers:
            numels.setdefault(layer.name, layer.numel)
    return tuple(numels), tuple(numels.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedLayers:
    """Partials of one step over all ranks: float64 (M, P); `seen` counts the (layer, shard) pairs in them."""

    partials_MP: NDArray[np.float64]
    measured: Measured
    num_nonfinite_by_rank: Mapping[int, NDArray[np.int64]]
    seen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replicas:
    """Layers that two writers hold alike: rows of the one that counts, and of the one whose copy is only compared."""

    counted: Writer
    copy: Writer
    rows: NDArray[np.intp]
    copy_rows: NDArray[np.intp]


class LayerMerger:
    """Merges layer partials of a fixed set of writers into a fixed list of layers; built once, used every step.

    A (layer, shard) that several ranks hold counts once, on the lowest of them.
    """

    def __init__(self, layer_names: Sequence[str], schemas: Mapping[Writer, LayerSchema]) -> None:
        self._names = tuple(layer_names)
        place = {name: index for index, name in enumerate(self._names)}
        self._place = {
            writer: np.array([place[layer.name] for layer in schema.layers], dtype=np.intp)
            for writer, schema in schemas.items()
        }
        columns = {writer: measured_columns(schema.statistics) for writer, schema in schemas.items()}
        self._unmeasured = {
            writer: np.array([column for column in ALL if column not in columns[writer]], dtype=np.intp)
            for writer in schemas
        }
        self._by_some = frozenset(column for found in columns.values() for column in found)
        self._own: dict[Writer, NDArray[np.intp]] = {}
        self._replicas: list[_Replicas] = []
        owners: dict[tuple[str, tuple[int, ...]], tuple[Writer, int]] = {}
        for writer in sorted(schemas):
            self._claim(writer, schemas[writer], owners)
        self._seen = len(owners)
        self._group_M = _groups(self._names, schemas.values())
        self._alike = AlikeRanks.of(self._own, self._place, self._unmeasured)

    def _claim(
        self,
        writer: Writer,
        schema: LayerSchema,
        owners: dict[tuple[str, tuple[int, ...]], tuple[Writer, int]],
    ) -> None:
        """Give `writer` every (layer, shard) that no earlier one holds; list the others as replicas."""
        own: list[int] = []
        copies: dict[Writer, list[tuple[int, int]]] = {}
        for row, layer in enumerate(schema.layers):
            owner, owner_row = owners.setdefault((layer.name, layer.shard), (writer, row))
            if owner == writer:
                own.append(row)
            else:
                copies.setdefault(owner, []).append((owner_row, row))
        self._own[writer] = np.array(own, dtype=np.intp)
        for owner, pairs in copies.items():
            rows = np.array(pairs, dtype=np.intp)
            self._replicas.append(
                _Replicas(counted=owner, copy=writer, rows=rows[:, 0], copy_rows=rows[:, 1])
            )

    def merge(self, partials: Mapping[Writer, NDArray[np.float64]]) -> MergedLayers:
        """Merge writer -> float64 (L, P), `widened`, of exactly the writers given at the start.

        # Hot path: once per step; must not loop over layers in Python.
        """
        if self._alike is not None:
            merged_MP, nonfinite_by_rank = self._alike.merge(partials, len(self._names))
            return MergedLayers(
                partials_MP=merged_MP,
                measured=EVERYTHING,
                num_nonfinite_by_rank=nonfinite_by_rank,
                seen=self._seen,
            )
        merged_MP = np.tile(IDENTITY, (len(self._names), 1))
        missing_MP: NDArray[np.bool_] | None = None
        nonfinite: dict[int, NDArray[np.int64]] = {}
        with np.errstate(all="ignore"):
            for writer in sorted(partials):
                has_gradient_L1 = partials[writer][:, COUNT : COUNT + 1] > 0
                partials_LP = np.where(has_gradient_L1, partials[writer], IDENTITY)
                own, place_L = self._own[writer], self._place[writer]
                _add(merged_MP, partials_LP[own], place_L[own])
                if len(self._unmeasured[writer]):
                    if missing_MP is None:
                        missing_MP = np.zeros(merged_MP.shape, dtype=np.bool_)
                    contributing = place_L[own][has_gradient_L1[own, 0]]
                    missing_MP[np.ix_(contributing, self._unmeasured[writer])] = True
                bad_L = partials_LP[:, NUM_NONFINITE]
                if bad_L.any():
                    bad_M = nonfinite.setdefault(writer[0], np.zeros(len(self._names), dtype=np.int64))
                    bad_M[place_L] = bad_L.astype(np.int64)
        measured = Measured(by_some=self._by_some, missing_MP=missing_MP)
        return MergedLayers(
            partials_MP=merged_MP, measured=measured, num_nonfinite_by_rank=nonfinite, seen=self._seen
        )

    def counted_once(self, merged_MP: NDArray[np.float64]) -> NDArray[np.float64]:
        """For totals: of the layers that are one parameter, only the first that has a gradient keeps its count."""
        if self._group_M is None:
            return merged_MP
        places = np.flatnonzero((self._group_M >= 0) & (merged_MP[:, COUNT] > 0))
        _, first = np.unique(self._group_M[places], return_index=True)
        once_MP = merged_MP.copy()
        once_MP[np.delete(places, first), COUNT] = 0.0
        return once_MP

    def mismatch(self, partials: Mapping[Writer, NDArray[np.float64]]) -> ReplicaMismatch | None:
        """First pair of replicas that disagree; copies without a gradient are not compared."""
        pairs = self._replicas
        if self._alike is not None and pairs and all(len(pair.rows) == len(self._names) for pair in pairs):
            # Whole ranks that are copies: all pairs are compared at once, and seldom is there one to look at.
            counted_KLP = np.stack([partials[pair.counted][:, : SUM_SQUARES + 1] for pair in pairs])
            copy_KLP = np.stack([partials[pair.copy][:, : SUM_SQUARES + 1] for pair in pairs])
            pairs = [pairs[at] for at in np.flatnonzero(_differ(counted_KLP, copy_KLP).any(axis=1))]
        for pair in pairs:
            counted_LP, copy_LP = partials[pair.counted][pair.rows], partials[pair.copy][pair.copy_rows]
            differ_L = _differ(counted_LP, copy_LP)
            if differ_L.any():
                at = int(np.argmax(differ_L))
                return ReplicaMismatch(
                    layer=self._names[self._place[pair.counted][pair.rows[at]]],
                    ranks=(pair.counted[0], pair.copy[0]),
                    sum_squares=(float(counted_LP[at, SUM_SQUARES]), float(copy_LP[at, SUM_SQUARES])),
                )
        return None


def _differ(counted: NDArray[np.float64], copy: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where two partials (..., P) of one shard differ by more than rounding; where both have a gradient."""
    squares, copied = counted[..., SUM_SQUARES], copy[..., SUM_SQUARES]
    with np.errstate(all="ignore"):
        differ = np.abs(squares - copied) > REPLICA_TOLERANCE * np.maximum(squares, copied)
    differ |= np.isnan(squares) != np.isnan(copied)
    return np.asarray(differ & (counted[..., COUNT] > 0) & (copy[..., COUNT] > 0))


def _add(merged_MP: NDArray[np.float64], own_LP: NDArray[np.float64], place_L: NDArray[np.intp]) -> None:
    """Merge rows into their places. Names are unique within a rank, so fancy indexing never meets a place twice."""
    held_LP = merged_MP[place_L]
    total_LP = held_LP + own_LP
    total_LP[:, MIN] = np.minimum(held_LP[:, MIN], own_LP[:, MIN])
    total_LP[:, MAX] = np.maximum(held_LP[:, MAX], own_LP[:, MAX])
    merged_MP[place_L] = total_LP


def _groups(names: Sequence[str], schemas: Iterable[LayerSchema]) -> NDArray[np.intp] | None:
    """By layer, the group of layers that are one parameter (`Layer.same_as`), -1: it is alone; None: all are."""
    place = {name: index for index, name in enumerate(names)}
    pairs = [
        (place[layer.name], place[layer.same_as])
        for schema in schemas
        for layer in schema.layers
        if layer.same_as in place
    ]
    if not pairs:
        return None
    parent = list(range(len(names)))

    def root_of(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    for here, there in pairs:
        low, high = sorted((root_of(here), root_of(there)))
        parent[high] = low
    group_M = np.full(len(names), -1, dtype=np.intp)
    for index in {index for pair in pairs for index in pair}:
        group_M[index] = root_of(index)
    return group_M


class ExpectedShards:
    """Counts the (layer, shard) pairs that report when every rank does."""

    def __init__(self) -> None:
        self._shards: dict[str, int] = {}
        self._total = 0

    def add(self, layers: Iterable[Layer]) -> int:
        """Take in what one more rank declares; returns the number."""
        for layer in layers:
            known = self._shards.get(layer.name, 0)
            if known < max(1, layer.num_shards):
                self._shards[layer.name] = max(1, layer.num_shards)
                self._total += self._shards[layer.name] - known
        return self._total
