"""Rule `replica_mismatch`: ranks that hold the same part of a layer report different gradients of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedLayers, FoldedStep
from gradiometer_server.domain.names import GRAD_NORM

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMismatchDefaults:
    """Defaults of the rule.

    Attributes:
        error_ratio: relative difference of the norms from which on it is an error: kernels that add in changing order
            can make less than that out of equal data.
        repeat_steps: a lasting state is reported again each so many steps; it must be below `quiet_steps`.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    error_ratio: float = 1e-3
    repeat_steps: int = 10
    quiet_steps: int = 20


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    breach_step: int | None = None


class ReplicaMismatchRule:
    """See the module's first lines."""

    name = "replica_mismatch"

    def __init__(self, defaults: ReplicaMismatchDefaults | None = None) -> None:
        self._defaults = defaults or ReplicaMismatchDefaults()
        self.quiet_steps = self._defaults.quiet_steps
        self._state = _State()

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """A breach at the first step with a mismatch, and each `repeat_steps` while it lasts."""
        if not isinstance(item, FoldedLayers) or item.mismatch is None:
            return []
        last = self._state.breach_step
        if last is not None and item.step - last < self._defaults.repeat_steps:
            return []
        self._state.breach_step = item.step
        found = item.mismatch
        norms = [math.sqrt(value) for value in found.sum_squares]
        largest = max(norms)
        ratio = abs(norms[0] - norms[1]) / largest if largest > 0 else 0.0
        # Also where one of them is NaN.
        is_small = ratio < self._defaults.error_ratio
        return [
            Breach(
                rule=self.name,
                severity=Severity.WARNING if is_small else Severity.ERROR,
                step=item.step,
                time_s=item.time_s,
                metric=GRAD_NORM,
                value=_number(norms[1]),
                baseline=_number(norms[0]),
                layers=(found.layer,),
                num_layers=1,
                ranks=found.ranks,
                facts=tuple(
                    f"rank {rank} has a gradient of norm {number_text(norm)}"
                    for rank, norm in zip(found.ranks, norms, strict=True)
                ),
            )
        ]

    def needs_all(self, block: FoldedBlock) -> bool:
        """See `base.Rule`."""
        return False

    def dump(self) -> bytes:
        """State as msgpack."""
        return msgspec.msgpack.encode(self._state)

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        state = msgspec.msgpack.decode(data, type=_State)
        if state.version == _VERSION:
            self._state = state


def _number(norm: float) -> float | None:
    """A norm that can be compared; the facts say which rank has none."""
    return None if math.isnan(norm) else norm
