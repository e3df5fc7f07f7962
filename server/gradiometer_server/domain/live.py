"""What the fold tells the live feed. The hub coalesces these per browser and turns them into JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradiometer_server.domain.alerts import Episode


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
