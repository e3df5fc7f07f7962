"""Merging many ranks that all report the same layers: one pass over one array instead of a dozen steps for each rank.

Pure. Shape letters: R ranks, L layers of each rank, M layers of the merged layout, P partial statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.fold.derive import COUNT, MAX, MIN, NUM_NONFINITE

Writer = tuple[int, int]
"""(rank, schema id): who reports a list of layers. Sorted, ranks come first."""

IDENTITY: Final = np.array([0.0, 0.0, 0.0, math.inf, -math.inf, 0.0, 0.0])
"""The partial of no elements: merging it changes nothing."""
_MIN_RANKS: Final = 4


class AlikeRanks:
    """Writers that report the same layers in the same order with all statistics: of each, all rows count, or none."""

    def __init__(
        self, counted: tuple[Writer, ...], copies: tuple[Writer, ...], place_L: NDArray[np.intp]
    ) -> None:
        self._counted, self._copies, self._place_L = counted, copies, place_L

    @classmethod
    def of(
        cls,
        own: Mapping[Writer, NDArray[np.intp]],
        place: Mapping[Writer, NDArray[np.intp]],
        unmeasured: Mapping[Writer, NDArray[np.intp]],
    ) -> AlikeRanks | None:
        """From the rows of each writer that count, their places in the layout, and the columns it did not measure.

        None: they differ, or are so few that it does not matter.
        """
        writers = sorted(own)
        if len(writers) < _MIN_RANKS:
            return None
        place_L = place[writers[0]]
        for writer in writers:
            is_all_or_none = len(own[writer]) in (0, len(place_L))
            if len(unmeasured[writer]) or not is_all_or_none or not np.array_equal(place[writer], place_L):
                return None
        counted = tuple(writer for writer in writers if len(own[writer]))
        return cls(counted, tuple(writer for writer in writers if not len(own[writer])), place_L)

    def merge(
        self, partials: Mapping[Writer, NDArray[np.float64]], num_layers: int
    ) -> tuple[NDArray[np.float64], dict[int, NDArray[np.int64]]]:
        """The merged partials (M, P), the same bits as one writer after the other gives, and `num_nonfinite_by_rank`.

        # Hot path: once per step; must not loop over layers in Python.
        """
        nonfinite: dict[int, NDArray[np.int64]] = {}
        stacked_RLP = self._stacked(partials, self._counted, num_layers, nonfinite)
        merged_LP = np.full(stacked_RLP.shape[1:], IDENTITY)
        with np.errstate(all="ignore"):
            # Rows are added in the order of the ranks: numpy sums in pairs only along the last axis.
            merged_LP += np.add.reduce(stacked_RLP, axis=0, initial=0.0)
            merged_LP[:, MIN] = np.minimum.reduce(stacked_RLP[:, :, MIN], axis=0)
            merged_LP[:, MAX] = np.maximum.reduce(stacked_RLP[:, :, MAX], axis=0)
        if self._copies:
            self._stacked(partials, self._copies, num_layers, nonfinite)
        merged_MP = np.tile(IDENTITY, (num_layers, 1))
        merged_MP[self._place_L] = merged_LP
        return merged_MP, dict(sorted(nonfinite.items()))

    def _stacked(
        self,
        partials: Mapping[Writer, NDArray[np.float64]],
        writers: tuple[Writer, ...],
        num_layers: int,
        nonfinite: dict[int, NDArray[np.int64]],
    ) -> NDArray[np.float64]:
        """Partials of these writers (R, L, P), those without a gradient neutral; notes who has non-finite elements."""
        stacked_RLP = np.stack([partials[writer] for writer in writers])
        has_gradient_RL = stacked_RLP[:, :, COUNT] > 0
        if not has_gradient_RL.all():
            stacked_RLP = np.where(has_gradient_RL[:, :, None], stacked_RLP, IDENTITY)
        bad_RL = stacked_RLP[:, :, NUM_NONFINITE]
        for row in np.flatnonzero(bad_RL.any(axis=1)):
            bad_M = nonfinite.setdefault(writers[row][0], np.zeros(num_layers, dtype=np.int64))
            bad_M[self._place_L] = bad_RL[row].astype(np.int64)
        return stacked_RLP
