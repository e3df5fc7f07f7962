"""What is known of x along the steps, where some of its points are only left as windows.

Shape letters: M points and windows of x, Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.summaries.axis import carried

NEVER: Final = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownX:
    """Points and windows of x by rising first step.

    Attributes:
        first_M, last_M: steps that each may hold; the same for a point.
        sure_M: the step from which on it is sure that x is known from it, `NEVER` if it is not.
        low_M, high_M: extremes of x in it, finite.
    """

    first_M: NDArray[np.int64]
    last_M: NDArray[np.int64]
    sure_M: NDArray[np.int64]
    low_M: NDArray[np.float64]
    high_M: NDArray[np.float64]

    @classmethod
    def join(cls, parts: Sequence[KnownX]) -> KnownX:
        """All parts (at least one) by rising first step, without those of which no x is finite."""
        columns = [
            getattr(parts[0], name)
            if len(parts) == 1
            else np.concatenate([getattr(part, name) for part in parts])
            for name in ("first_M", "last_M", "sure_M", "low_M", "high_M")
        ]
        finite_M = np.isfinite(columns[3])
        if not finite_M.all():
            columns = [column[finite_M] for column in columns]
        if not (columns[0][1:] >= columns[0][:-1]).all():
            order = np.argsort(columns[0], kind="stable")
            columns = [column[order] for column in columns]
        first_M, last_M, sure_M, low_M, high_M = columns
        return cls(first_M=first_M, last_M=last_M, sure_M=sure_M, low_M=low_M, high_M=high_M)

    @classmethod
    def of_points(cls, steps_M: NDArray[np.int64], x_M: NDArray[np.float64]) -> KnownX:
        """Exact points."""
        return cls(first_M=steps_M, last_M=steps_M, sure_M=steps_M, low_M=x_M, high_M=x_M)

    def at(self, steps_Q: NDArray[np.int64]) -> NDArray[np.float64]:
        """X of each step, the lowest of its window if that is all that is known; NaN if nothing is known at all."""
        if not len(self.first_M):
            return np.full(len(steps_Q), np.nan)
        return carried(steps_Q, self.first_M, self.low_M)

    def between(
        self, first_Q: NDArray[np.int64], last_Q: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The smallest and the largest x that any step of first..last (inclusive) may have; NaN if nothing is known.

        Never too narrow; where there are only points, and the steps of a question are one, exact.
        """
        if not len(self.first_M):
            nothing_Q = np.full(len(first_Q), np.nan)
            return nothing_Q, nothing_Q
        by_sure = np.argsort(self.sure_M, kind="stable")
        sure_M = self.sure_M[by_sure]
        # Behind what is surely known at a step, no x from before it is carried on to that step.
        newest_M = np.maximum.accumulate(self.first_M[by_sure])
        at_Q = np.searchsorted(sure_M, first_Q, side="right") - 1
        reach_M = np.maximum.accumulate(self.last_M)
        begin_Q = np.where(at_Q < 0, 0, np.searchsorted(reach_M, newest_M[at_Q]))
        # Steps before the first known x have that one.
        until_Q = np.where(at_Q < 0, np.maximum(last_Q, sure_M[0]), last_Q)
        end_Q = np.searchsorted(self.first_M, until_Q, side="right")
        edges = np.column_stack([begin_Q, end_Q]).ravel()
        low_Q = np.minimum.reduceat(np.append(self.low_M, np.inf), edges)[::2]
        high_Q = np.maximum.reduceat(np.append(self.high_M, -np.inf), edges)[::2]
        return low_Q, high_Q
