"""How much of the gradient the ranks of one step told: what is missing must not pass for a smaller gradient. Pure.

A part is missing when a rank did not report, when a gradient could not be read, or when the elements that were read
do not add up to the layer. Shape letters: L layers of one rank, M layers of the merged layout, P partial statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer.wire import LayerSchema
from gradiometer_server.domain import names
from gradiometer_server.domain.absent import ABSENT
from gradiometer_server.fold.alike import Writer
from gradiometer_server.fold.derive import COUNT, SUM_SQUARES

_OF_ALL: Final = (names.GRAD_NORM, names.GRAD_ABS_MAX, names.GRAD_ZERO_FRACTION)
"""Totals that mean the whole gradient. The number of non-finite elements says enough as a lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What was told in one step.

    Attributes:
        fraction: elements told over elements that the layers with a gradient have; 1: all of them.
        withheld_M: layers of which not all was told; None: there is none.
        num_incomplete: how many of them lack a part that a rank did not tell, or do not add up.
    """

    fraction: float
    withheld_M: NDArray[np.bool_] | None
    num_incomplete: int = 0


COMPLETE: Final = Coverage(fraction=1.0, withheld_M=None)


class CoverageCheck:
    """Judges the steps that one set of writers report; built once, used every step.

    Args:
        layer_names, numels: of the merged layout.
        schemas: all that any rank of the attempt declared.
        writers: those that report in the step.
    """

    def __init__(
        self,
        layer_names: Sequence[str],
        numels: Sequence[int],
        schemas: Mapping[Writer, LayerSchema],
        writers: Collection[Writer],
    ) -> None:
        place = {name: index for index, name in enumerate(layer_names)}
        self._numel_M = np.array(numels, dtype=np.float64)
        self._place = {
            writer: np.array([place[layer.name] for layer in schemas[writer].layers], dtype=np.intp)
            for writer in writers
        }
        lost = [place[name] for name in _lost(schemas, writers)]
        self._lost_M = np.zeros(len(place), dtype=np.bool_)
        self._lost_M[lost] = True

    def of(self, partials: Mapping[Writer, NDArray[np.float64]], merged_MP: NDArray[np.float64]) -> Coverage:
        """Judge one step from the partials (L, P) of its writers and their merge.

        # Hot path: once per step; must not loop over layers in Python.
        """
        count_M = merged_MP[:, COUNT]
        silent_M, unread_M = np.zeros((2, len(count_M)), dtype=np.bool_)
        for writer, partials_LP in partials.items():
            none_L = ~(partials_LP[:, COUNT] > 0)
            if none_L.any():
                unread_L = none_L & np.isnan(partials_LP[:, SUM_SQUARES])
                unread_M[self._place[writer][unread_L]] = True
                silent_M[self._place[writer][none_L]] = True
        # A shard without a gradient, e.g. of an expert that got no tokens, leaves nothing to add up.
        incomplete_M = self._lost_M | ((count_M > 0) & (count_M != self._numel_M) & ~silent_M)
        withheld_M = incomplete_M | unread_M
        if not withheld_M.any():
            return COMPLETE
        gap = np.abs(self._numel_M - count_M)[withheld_M].sum()
        total = self._numel_M[withheld_M | (count_M > 0)].sum()
        return Coverage(
            fraction=float(max(0.0, 1.0 - gap / total)),
            withheld_M=withheld_M,
            num_incomplete=int((incomplete_M & ~unread_M).sum()),
        )


def _lost(schemas: Mapping[Writer, LayerSchema], writers: Collection[Writer]) -> list[str]:
    """Layers of which some shard is not reported, though the layer is due in this step.

    A layer that nobody reports is due only if no rank that reports anything has it: a rank with several optimizers
    need not step all of them at once.
    """
    ranks = {rank for rank, _ in writers}
    num_shards: dict[tuple[str, int], int] = {}
    held: set[str] = set()
    for writer in sorted(schemas):
        for layer in schemas[writer].layers:
            # The newest declaration of a rank counts.
            num_shards[layer.name, writer[0]] = layer.num_shards
            if writer[0] in ranks:
                held.add(layer.name)
    seen: dict[str, set[tuple[int, ...]]] = {}
    for writer in writers:
        for layer in schemas[writer].layers:
            seen.setdefault(layer.name, set()).add(layer.shard)
    due: dict[str, int] = {}
    for (name, _), number in num_shards.items():
        if name in seen or name not in held:
            due[name] = max(due.get(name, 1), number)
    return [name for name, number in due.items() if len(seen.get(name, ())) < number]


def without_withheld(
    statistics: Mapping[str, NDArray[np.float64]], coverage: Coverage
) -> Mapping[str, NDArray[np.float64]]:
    """Layer statistics (M,) with `ABSENT` for withheld layers, but for what no missing part can undo: NaN and Inf."""
    if coverage.withheld_M is None:
        return statistics
    for name, values_M in statistics.items():
        undone_M = values_M == 0.0 if name == "num_nonfinite" else np.isfinite(values_M)
        values_M[coverage.withheld_M & undone_M] = ABSENT
    return statistics


def totals_told(totals: Mapping[str, float], coverage: Coverage, *, num_ranks: int) -> dict[str, float]:
    """Totals of the gradient without those that a missing part makes wrong, and the coverage where it can be in doubt."""
    told = dict(totals)
    if coverage.withheld_M is not None:
        for name in _OF_ALL:
            if np.isfinite(told.get(name, np.nan)):
                del told[name]
    if coverage.withheld_M is not None or (num_ranks > 1 and told):
        told[names.GRAD_COVERAGE] = coverage.fraction
    return told
