"""The newest points of a run's series, kept in memory until they are in chunks.

Written by the one thread that folds the run, read by any: arrays only ever grow at their end, so a reader's view of
the filled part stays true while the writer goes on.

Shape letters: N points, W width of a series.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.series import Tail

_FIRST_ROWS: Final = 64


class TailBuffer:
    """Points of one series in order of arrival. Not thread-safe for writers; `view` may be called by readers."""

    def __init__(self, *, width: int, dtype: type[np.float32] | type[np.float64]) -> None:
        self._steps_N = np.empty(_FIRST_ROWS, dtype=np.int64)
        self._values_NW: NDArray[np.floating[Any]] = np.empty((_FIRST_ROWS, width), dtype=dtype)
        self._filled = 0

    def __len__(self) -> int:
        return self._filled

    @property
    def num_bytes(self) -> int:
        """Bytes of the points held."""
        return self._filled * (8 + int(self._values_NW.itemsize) * int(self._values_NW.shape[1]))

    def append(self, step: int, values: NDArray[np.floating[Any]] | float) -> None:
        """Add one point, its values of shape (W,) or a float where W is 1.

        A float64 row in a float32 buffer holds a value that float32 cannot: the buffer then becomes float64.
        """
        dtype = self._values_NW.dtype
        if dtype == np.float32 and isinstance(values, np.ndarray) and values.dtype == np.float64:
            dtype = np.dtype(np.float64)
        if self._filled == len(self._steps_N) or dtype != self._values_NW.dtype:
            self._grow(dtype)
        self._steps_N[self._filled] = step
        self._values_NW[self._filled] = values
        # The count moves last: a reader that sees it sees the row as well.
        self._filled += 1

    def extend(self, steps_N: NDArray[np.int64], values_NW: NDArray[np.float64]) -> None:
        """Add many points to a float64 buffer."""
        filled = self._filled + len(steps_N)
        if filled > len(self._steps_N):
            self._grow(self._values_NW.dtype, rows=filled)
        self._steps_N[self._filled : filled] = steps_N
        self._values_NW[self._filled : filled] = values_NW
        self._filled = filled

    def view(self) -> Tail:
        """The points so far, without a copy."""
        filled = self._filled
        return Tail(steps_N=self._steps_N[:filled], values_NW=self._values_NW[:filled])

    def _grow(self, dtype: np.dtype[Any], rows: int = _FIRST_ROWS) -> None:
        """Move to new arrays; readers keep the old ones."""
        rows = max(rows, 2 * self._filled)
        steps_N = np.empty(rows, dtype=np.int64)
        values_NW = np.empty((rows, self._values_NW.shape[1]), dtype=dtype)
        steps_N[: self._filled] = self._steps_N[: self._filled]
        values_NW[: self._filled] = self._values_NW[: self._filled]
        self._steps_N, self._values_NW = steps_N, values_NW
