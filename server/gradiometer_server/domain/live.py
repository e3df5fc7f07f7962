"""What the fold tells the live feed. The hub coalesces these per browser and turns them into JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.alerts import Episode


class ManyPoints(Sequence[tuple[int, float]]):
    """Points as arrays (N,), which become numbers of Python only if somebody looks at them: mostly nobody does."""

    def __init__(self, steps_N: NDArray[np.int64], values_N: NDArray[np.float64]) -> None:
        self._steps_N, self._values_N = steps_N, values_N

    def __len__(self) -> int:
        return len(self._steps_N)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._steps_N.tolist(), self._values_N.tolist(), strict=True)

    @overload
    def __getitem__(self, index: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, float]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, float] | Sequence[tuple[int, float]]:
        if isinstance(index, slice):
            return ManyPoints(self._steps_N[index], self._values_N[index])
        return int(self._steps_N[index]), float(self._values_N[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class PointsUpdate:
    """New merged points of a run: metric -> [(step, value), ...] in order of arrival.

    `layers_step`: last step whose layer statistics are folded, when it moved.
    """

    run_id: str
    series: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    layers_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertUpdate:
    """An episode opened, grew or resolved; it is already stored."""

    run_id: str
    episode: Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUpdate:
    """State, counters, tags or exit of a run changed; read them from the store."""

    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsUpdate:
    """A metric that the run did not have before."""

    run_id: str


LiveUpdate = PointsUpdate | AlertUpdate | RunUpdate | MetricsUpdate
