"""Merging the ranks of one attempt, step by step. Pure; told the time by its caller (monotonic seconds).

Shape letters: S steps of a frame, C columns, L layers of one rank, P partial statistics, K those of a schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer.wire import STATISTICS, Column, Layer, LayerSchema
from gradiometer_server.domain.folded import Folded, FoldedBlock, FoldedLayers, FoldedScalars, Layout
from gradiometer_server.fold.coverage import CoverageCheck, totals_told, without_withheld
from gradiometer_server.fold.derive import derive_global, derive_layers
from gradiometer_server.fold.lane import Cell, Lane
from gradiometer_server.fold.ranks import (
    ExpectedShards,
    LayerMerger,
    merge_scalar,
    merged_layers,
    widened,
)
from gradiometer_server.fold.times import StepTimes
from gradiometer_server.fold.watches import LayerWatches
from gradiometer_server.fold.watermark import NO_BOUND, KeptBound, Watermark

LayoutMaker = Callable[[tuple[str, ...], tuple[int, ...]], Layout]
"""Gives the layout of these layer names and element counts; the same one for the same names."""

Partials = Mapping[int, NDArray[np.float64]]
"""schema id -> float64 (L, P): what one rank says of all layers in one step."""

Writer = tuple[int, int]
"""(rank, schema id)."""

_MAX_MERGERS: Final = 64
_MAX_LAYER_BYTES: Final = 256 * 1024 * 1024
"""Most of the partials that wait for other ranks, by the largest rank's; a step of all ranks is kept in any case."""


class AttemptFold:
    """State of one attempt. Every method returns what can be shown now, in the order in which to show it."""

    def __init__(self, *, ordinal: int, world_size: int, silence_s: float, make_layout: LayoutMaker) -> None:
        self.ordinal = ordinal
        self.mark = Watermark(world_size=world_size, silence_s=silence_s)
        self.times = StepTimes()
        self.num_late = 0
        self._make_layout = make_layout
        self._watches = LayerWatches()
        self._scalars: dict[str, Lane[float]] = {}
        self._merges: dict[str, dict[int, str]] = {}
        self._layers: Lane[Partials] = Lane(shows_lone=False, is_whole=self._watches.is_whole)
        self._alone: tuple[int, Partials] | None = None
        self._schemas: dict[Writer, LayerSchema] = {}
        self._declared_at: dict[Writer, int] = {}
        self._mergers: dict[tuple[tuple[Writer, ...], int], tuple[Layout, LayerMerger, CoverageCheck]] = {}
        self._lists: dict[int, set[tuple[Layer, ...]]] = {}
        self._shards = ExpectedShards()
        self._expected = 0
        self._waiting: dict[str, None] = {}
        self._passed = KeptBound()
        self._scalar_steps: dict[int, int] = {}

    def declare_scalars(self, rank: int, columns: Iterable[Column]) -> None:
        """`rank` will report these metrics."""
        for column in columns:
            self._lane(column.name).declared.add(rank)
            self._merges.setdefault(column.name, {})[rank] = column.merge

    def declare_layers(self, rank: int, schema: LayerSchema, *, after_step: int = -1) -> None:
        """`rank` will report these layers; the layout of the attempt grows by it after its step `after_step`."""
        self._layers.declared.add(rank)
        writer = (rank, schema.schema_id)
        if after_step >= 0 and writer not in self._schemas:
            self._declared_at[writer] = after_step
        self._schemas[writer] = schema
        self._watches.declare(rank, schema)
        self._expected = self._shards.add(schema.layers)
        lists = self._lists.setdefault(rank, set())
        # One schema of each list of layers: the others say the same of other steps, with fewer or more statistics.
        lists.add(schema.layers)
        value_bytes = 8 * len(STATISTICS) * sum(map(len, lists))
        self._layers.max_values = min(self._layers.max_values, max(1, _MAX_LAYER_BYTES // value_bytes))
        self._mergers.clear()

    def block(
        self,
        names: tuple[str, ...],
        steps: Sequence[int],
        times: Sequence[float],
        values_SC: NDArray[np.float64],
    ) -> list[Folded]:
        """Many rising steps of the only rank of a world of one. # Hot path: no loop over steps."""
        self.times.report_all(steps, times)
        return [
            FoldedBlock(
                attempt=self.ordinal,
                names=names,
                steps_S=np.array(steps, dtype=np.int64),
                times_S=np.array(times, dtype=np.float64),
                values_SC=values_SC,
            )
        ]

    def scalars(
        self,
        rank: int,
        seq: int,
        step: int,
        time_s: float,
        names: Sequence[str],
        values: Sequence[float],
        *,
        again: bool = False,
    ) -> list[Folded]:
        """Values of one step of one rank. With a world of one there is nothing to wait for and nothing to keep.

        `again`: they were taken in before a restart, so a step that is forgotten is one that is stored.
        """
        self.times.report(step, time_s)
        if self.mark.world_size == 1:
            merged = dict(zip(names, values, strict=True))
            return [FoldedScalars(attempt=self.ordinal, step=step, time_s=time_s, values=merged)]
        self._scalar_steps[rank] = max(step, self._scalar_steps.get(rank, -1))
        late: dict[str, dict[int, float]] = {}
        for name, value in zip(names, values, strict=True):
            if self._lane(name).put(rank, seq, step, value) is None:
                if not again:
                    late[name] = {rank: value}
            else:
                self._waiting[name] = None
        return self._late_scalars(step, time_s, late)

    def _late_scalars(
        self, step: int, time_s: float, late: Mapping[str, Mapping[int, float]]
    ) -> list[Folded]:
        """Values of a step that is forgotten: a metric of one rank alone needs no others, the rest stays per rank."""
        if not late:
            return []
        alone = {
            name: next(iter(by_rank.values()))
            for name, by_rank in late.items()
            if len(self._lane(name).declared) == 1
        }
        by_rank = {name: ranks for name, ranks in late.items() if name not in alone}
        self.num_late += bool(by_rank)
        return [FoldedScalars(attempt=self.ordinal, step=step, time_s=time_s, values=alone, by_rank=by_rank)]

    def layers(
        self,
        rank: int,
        seq: int,
        step: int,
        time_s: float,
        schema_id: int,
        partials_LK: NDArray[np.float64],
        *,
        again: bool = False,
    ) -> list[Folded]:
        """Partial statistics of one step of one rank, in the columns of its schema; `again` as in `scalars`."""
        self.times.report(step, time_s)
        mine = {schema_id: widened(self._schemas[rank, schema_id], partials_LK)}
        if self._watches.num == 1 and self.mark.world_size == 1:
            self._alone = (step, mine)
            return self._show_layers(step, time_s, {rank: mine})
        earlier = self._layers.value(rank, step)
        if earlier is None and self._alone is not None and self._alone[0] == step:
            # The step in which a second watch begins: the first one was shown alone.
            earlier = self._alone[1]
        cell = self._layers.put(rank, seq, step, {**earlier, **mine} if earlier else mine)
        if cell is None and not again:
            self.num_late += 1
        return []

    def show(self, now_s: float, *, all_lanes: bool = False) -> list[Folded]:
        """Whatever has become ready; `all_lanes` also forgets old cells of metrics that nobody reports any more."""
        ready: dict[int, dict[str, Cell[float]]] = {}
        # By scalars alone: a rank's layers come before the scalars of their steps, and say nothing of them.
        passed = self._passed.below(self.mark, now_s, self._scalar_steps, self._scalar_steps)
        for name in list(self._scalars) if all_lanes else list(self._waiting):
            lane = self._scalars[name]
            for cell in lane.take_ready(self.mark, now_s, passed):
                ready.setdefault(cell.step, {})[name] = cell
            if not lane.is_waiting:
                self._waiting.pop(name, None)
        items: list[Folded] = [self._merge_scalars(step, cells) for step, cells in sorted(ready.items())]
        for layers in self._layers.take_ready(self.mark, now_s, passed):
            items += self._show_layers(layers.step, self.times.of(layers.step), layers.by_rank)
        return items

    def _merge_scalars(self, step: int, cells: Mapping[str, Cell[float]]) -> FoldedScalars:
        values, by_rank = {}, {}
        for name, cell in cells.items():
            merges = self._merges[name]
            values[name] = merge_scalar(cell.by_rank, merges[min(merges)])
            if len(cell.by_rank) > 1:
                by_rank[name] = {rank: cell.by_rank[rank] for rank in sorted(cell.by_rank)}
        return FoldedScalars(
            attempt=self.ordinal, step=step, time_s=self.times.of(step), values=values, by_rank=by_rank
        )

    def _show_layers(self, step: int, time_s: float, by_rank: Mapping[int, Partials]) -> list[Folded]:
        """# Hot path: once per step; must not loop over layers."""
        partials = {
            (rank, schema_id): partials_LP
            for rank, schemas in sorted(by_rank.items())
            for schema_id, partials_LP in sorted(schemas.items())
        }
        layout, merger, check = self._merger(tuple(partials), step)
        merged = merger.merge(partials)
        coverage = check.of(partials, merged.partials_MP)
        items: list[Folded] = [
            FoldedLayers(
                attempt=self.ordinal,
                step=step,
                time_s=time_s,
                layout=layout,
                statistics=without_withheld(derive_layers(merged.partials_MP, merged.measured), coverage),
                num_nonfinite_by_rank=merged.num_nonfinite_by_rank,
                expected=self._expected,
                seen=merged.seen,
                coverage=coverage.fraction,
                withheld=coverage.withheld_M,
                num_incomplete=coverage.num_incomplete,
                missing_ranks=tuple(rank for rank in range(self.mark.world_size) if rank not in by_rank),
                mismatch=merger.mismatch(partials),
            )
        ]
        totals = derive_global(merger.counted_once(merged.partials_MP), merged.measured)
        totals = totals_told(totals, coverage, num_ranks=self.mark.world_size)
        if totals:
            items.append(FoldedScalars(attempt=self.ordinal, step=step, time_s=time_s, values=totals))
        return items

    def _merger(self, writers: tuple[Writer, ...], step: int) -> tuple[Layout, LayerMerger, CoverageCheck]:
        """The layout of the layers that were known in `step`, and how these (rank, schema) pairs merge into it.

        What a rank declares later has no part in it: otherwise it would depend on how far the other ranks are.
        """
        # Of schemas declared one after the other, how many were known says which.
        num_known = sum(after < step for after in self._declared_at.values())
        found = self._mergers.get((writers, num_known))
        if found is None:
            known = {
                writer: schema
                for writer, schema in self._schemas.items()
                if self._declared_at.get(writer, -1) < step or writer in writers
            }
            layout = self._make_layout(*merged_layers(known))
            if len(self._mergers) >= _MAX_MERGERS:
                self._mergers.clear()
            merger = LayerMerger(layout.names, {writer: known[writer] for writer in writers})
            check = CoverageCheck(layout.names, layout.numels, known, writers)
            found = self._mergers[writers, num_known] = (layout, merger, check)
        return found

    def needed_seqs(self) -> dict[int, int]:
        """By rank, the lowest record number that is still needed to finish a step."""
        lowest: dict[int, int] = self._layers.first_seqs()
        for lane in self._scalars.values():
            for rank, seq in lane.first_seqs().items():
                lowest[rank] = min(seq, lowest.get(rank, NO_BOUND))
        return lowest

    def released(self) -> dict[str, int]:
        """By lane ("" for layers), the step below which nothing is merged any more."""
        below = {name: lane.released_below for name, lane in self._scalars.items() if lane.released_below}
        return {**below, "": self._layers.released_below}

    def declared_later(self) -> list[tuple[int, int, int]]:
        """(rank, schema id, step after which it was declared) of what was not declared before the first step."""
        return [(*writer, after) for writer, after in self._declared_at.items()]

    def restore_declared(self, later: Iterable[tuple[int, int, int]]) -> None:
        """Inverse of `declared_later`."""
        self._declared_at = {(rank, schema_id): after for rank, schema_id, after in later}

    def restore_released(self, below: Mapping[str, int]) -> None:
        """Inverse of `released`."""
        for name, step in below.items():
            (self._lane(name) if name else self._layers).released_below = step

    def _lane(self, name: str) -> Lane[float]:
        lane = self._scalars.get(name)
        if lane is None:
            lane = self._scalars[name] = Lane(shows_lone=True)
        return lane
