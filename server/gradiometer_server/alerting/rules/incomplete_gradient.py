"""Rule `incomplete_gradient`: the training goes on, but a part of the gradient is no longer told."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedLayers, FoldedStep
from gradiometer_server.domain.names import GRAD_COVERAGE

_VERSION = 1
_MAX_RANKS_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class IncompleteGradientDefaults:
    """Defaults of the rule.

    Attributes:
        after_steps: consecutive incomplete steps: where a run is ended, its ranks rarely end in the same step.
        repeat_steps: a lasting state is reported again each so many steps; it must be below `quiet_steps`.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    after_steps: int = 3
    repeat_steps: int = 10
    quiet_steps: int = 20


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    num_steps: int = 0
    """Consecutive incomplete steps."""


class IncompleteGradient:
    """See the module's first lines."""

    name = "incomplete_gradient"

    def __init__(self, defaults: IncompleteGradientDefaults | None = None) -> None:
        self._defaults = defaults or IncompleteGradientDefaults()
        self.quiet_steps = self._defaults.quiet_steps
        self._state = _State()

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """A breach after `after_steps` incomplete steps, and each `repeat_steps` while it lasts."""
        if not isinstance(item, FoldedLayers):
            return []
        if not item.num_incomplete:
            self._state.num_steps = 0
            return []
        self._state.num_steps += 1
        num_over = self._state.num_steps - self._defaults.after_steps
        if num_over < 0 or num_over % self._defaults.repeat_steps:
            return []
        return [
            Breach(
                rule=self.name,
                severity=Severity.WARNING,
                step=item.step,
                time_s=item.time_s,
                metric=GRAD_COVERAGE,
                value=item.coverage,
                threshold=1.0,
                ranks=item.missing_ranks[:_MAX_RANKS_NAMED],
                facts=(f"{item.num_incomplete} of {len(item.layout.names)} layers are incomplete",),
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
