"""What every alert rule is: it sees folded items in order, keeps a small state, and returns breaches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.alerts import Breach
from gradiometer_server.domain.folded import FoldedBlock, FoldedLayers, FoldedStep

MAX_NAMED_LAYERS = 20
"""Most layers that one breach names; `num_layers` still counts all of them."""


class Rule(Protocol):
    """One rule. `observe` must be deterministic: the same items from the same state give the same breaches.

    `history` holds layer norms of *earlier* steps only, so that a baseline never contains the value it judges.
    """

    name: str
    quiet_steps: int
    """An episode of this rule resolves when this many steps went by without a breach."""

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """Breaches that `item` completes; usually none."""
        ...

    def needs_all(self, block: FoldedBlock) -> bool:
        """Whether this rule must see every step of `block`.

        False: no step of it can be a breach, and to see the first and the last two of them leaves the same state.
        """
        ...

    def dump(self) -> bytes:
        """State as msgpack, with a version inside."""
        ...

    def load(self, data: bytes) -> None:
        """Take over a state that `dump` wrote; one of another version is ignored, and the rule learns afresh."""
        ...


@runtime_checkable
class TakesBlocks(Protocol):
    """A rule that needs to see every step, but can see them all at once."""

    def take_block(self, block: FoldedBlock) -> bool:
        """Take in all of `block` at once, if it is usual: no breach in it, and the state as after every single step.

        False: it was not, or this rule cannot; nothing is taken in, and the steps must come one by one.
        """
        ...


def is_loss(metric: str) -> bool:
    """Whether `metric` is a training loss: its name says loss, and its group is `train` or none."""
    group, _, name = metric.rpartition("/")
    return group in ("", "train") and "loss" in name.lower()


def nonfinite_layers(item: FoldedLayers) -> NDArray[np.bool_]:
    """Layers (L,) with a NaN or infinity among their elements.

    # Hot path: healthy layers cost two comparisons of whole arrays.

    An infinite norm alone is none: the squares of finite float64 elements beyond 1e154 have no finite sum.
    """
    norm_L, count_L = item.statistics["norm"], item.statistics["num_nonfinite"]
    bad_L: NDArray[np.bool_] = ((count_L > 0) | np.isnan(norm_L)) & ~is_absent(norm_L)
    return bad_L


def nonfinite_losses(values: Mapping[str, float]) -> list[str]:
    """Names of the losses in `values` that are NaN or infinite."""
    return [name for name, value in values.items() if not math.isfinite(value) and is_loss(name)]


def has_nonfinite_loss(block: FoldedBlock) -> bool:
    """Whether a loss is NaN or infinite in any step."""
    columns = [column for column, name in enumerate(block.names) if is_loss(name)]
    return bool(columns) and not bool(np.isfinite(block.values_SC[:, columns]).all())


def number_text(value: float | None) -> str:
    """A number as a person writes it: `NaN`, `Inf`, or three significant digits."""
    if value is None:
        return "unknown"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
