"""Values of one thing (a metric, or all layers) that several ranks report for the same steps. Pure.

A lane collects what the ranks say of each step (a cell) and tells when a cell can be shown and when it can be
forgotten. Every lane has its own progress, because users count steps as they like: one metric may run ahead of others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from gradiometer_server.fold.watermark import NO_BOUND, KeptBound, Watermark

MAX_HELD: Final = 256
"""Shown but incomplete cells that a lane keeps, so that late ranks can still be merged in."""
MAX_CELLS: Final = 4096
"""Most cells of a lane, shown or not: a rank far ahead of the others must not fill the memory."""

V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class Cell(Generic[V]):
    """What ranks said of one step: values and first record number, by rank."""

    step: int
    by_rank: dict[int, V] = field(default_factory=dict)
    seqs: dict[int, int] = field(default_factory=dict)


class Lane(Generic[V]):
    """Cells of one thing. Ranks that declared it are waited for by what they report in this lane, others by any step.

    `shows_lone`: a thing that only one rank declared is shown at once, and merged again should others come. Layers
    are not: a layout that grows rank by rank at every start would be no layout.

    `max_values`: most values of single ranks in all cells together, where they are large.

    `is_whole(rank, value)`: whether a rank has said all of a step that it will say; without it, always.
    """

    def __init__(
        self,
        *,
        shows_lone: bool,
        max_cells: int = MAX_CELLS,
        is_whole: Callable[[int, V], bool] | None = None,
    ) -> None:
        self.declared: set[int] = set()
        self.max_cells, self.max_values = max_cells, NO_BOUND
        self._shows_lone, self._is_whole = shows_lone, is_whole
        self._fresh: set[int] = set()
        self._cells: dict[int, Cell[V]] = {}
        self._heap: list[int] = []
        self._last_step: dict[int, int] = {}
        self._touched: set[int] = set()
        self._num_values = 0
        self._judged_below = -1
        self._emit, self._final = KeptBound(), KeptBound(is_final=True)
        self.released_below = 0

    def put(self, rank: int, seq: int, step: int, value: V) -> Cell[V] | None:
        """Take a value in; None if the step was forgotten already. A rank's later word on a step wins."""
        cell = self._cells.get(step)
        if cell is None:
            if step < self.released_below:
                return None
            cell = self._cells[step] = Cell(step=step)
            heapq.heappush(self._heap, step)
        self._num_values += rank not in cell.by_rank
        cell.by_rank[rank] = value
        cell.seqs.setdefault(rank, seq)
        self._fresh.add(step)
        self._touched.add(step)
        self._last_step[rank] = max(step, self._last_step.get(rank, -1))
        return cell

    def value(self, rank: int, step: int) -> V | None:
        """What `rank` said of `step`, if it is still held."""
        cell = self._cells.get(step)
        return None if cell is None else cell.by_rank.get(rank)

    def take_ready(self, mark: Watermark, now_s: float, passed: int) -> list[Cell[V]]:
        """Cells that can be shown now and were not since their last change, by step; then forgets what is done.

        A cell can be shown when it is complete, of one rank alone, or passed by every live rank. It is done when
        every rank has passed it; incomplete ones go when too many are held, shown or not.

        To have delivered is not enough: a rank may say a step again, and its last word counts, until it speaks of a
        later step in any scalar (`passed`: below this every live rank does), or falls silent. Where ranks say a step in
        several pieces (`is_whole`), one that nobody has heard of may come until they do so in this lane.
        """
        # Hot path: after every frame of every rank; must not look at all ranks, nor at cells that nothing happened to.
        bound = self._emit.below(mark, now_s, self.declared, self._last_step)
        lone = self._shows_lone and len(self.declared) == 1
        changed = self._fresh if bound != self._judged_below else self._touched & self._fresh
        self._judged_below, self._touched = bound, set()
        shown = [
            self._cells[step]
            for step in sorted(changed)
            if lone or step < bound or self._is_complete(self._cells[step], mark)
        ]
        self._fresh.difference_update(cell.step for cell in shown)
        return shown + self._release(mark, bound, passed if self._is_whole is None else bound)

    def _is_complete(self, cell: Cell[V], mark: Watermark) -> bool:
        if len(cell.by_rank) < mark.world_size:
            return False
        whole = self._is_whole
        return whole is None or all(whole(rank, value) for rank, value in cell.by_rank.items())

    @property
    def is_waiting(self) -> bool:
        """Whether a cell is there that was not shown since its last change."""
        return bool(self._fresh)

    def _release(self, mark: Watermark, bound: int, over: int) -> list[Cell[V]]:
        """Forget cells from the lowest step on, as far as they are done or too many; the latter may be unshown."""
        final = self._final.below(mark, 0.0, self.declared, self._last_step)
        pushed_out: list[Cell[V]] = []
        while self._heap:
            cell, fresh = self._cells[self._heap[0]], self._heap[0] in self._fresh
            done = not fresh and (cell.step < final or (cell.step < over and self._is_complete(cell, mark)))
            crowded = not fresh and cell.step < bound and len(self._heap) > MAX_HELD
            if not (done or crowded or self._is_full(mark)):
                break
            heapq.heappop(self._heap)
            del self._cells[cell.step]
            self._num_values -= len(cell.by_rank)
            self._fresh.discard(cell.step)
            self.released_below = max(self.released_below, cell.step + 1)
            if fresh:
                pushed_out.append(cell)
        return pushed_out

    def _is_full(self, mark: Watermark) -> bool:
        return len(self._heap) > self.max_cells or self._num_values > max(
            self.max_values, 2 * mark.world_size
        )

    def first_seqs(self) -> dict[int, int]:
        """By rank, the lowest record number that a cell still needs."""
        lowest: dict[int, int] = {}
        for cell in self._cells.values():
            for rank, seq in cell.seqs.items():
                lowest[rank] = min(seq, lowest.get(rank, NO_BOUND))
        return lowest
