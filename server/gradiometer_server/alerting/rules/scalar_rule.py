"""What the rules share that read only scalars and keep their state in one structure.

# Hot path: a million steps may come within seconds, in blocks; what a rule does to a usual block must be a few
# operations on whole arrays, or a loop without calls.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import msgspec

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.alerting.rules.baseline import has_judged_loss
from gradiometer_server.domain.alerts import Breach
from gradiometer_server.domain.folded import FoldedBlock, FoldedScalars, FoldedStep

STATE_VERSION: Final = 1


class ScalarState(msgspec.Struct, kw_only=True):
    """State of such a rule; one of another version is ignored."""

    version: int = STATE_VERSION


S = TypeVar("S", bound=ScalarState)


class ScalarRule(Generic[S]):
    """Give `reads` or `reads_losses`, and `judge`."""

    name = ""
    reads: frozenset[str] = frozenset()
    """Metrics that the rule must see at every step."""
    reads_losses = False
    """Whether it must see every loss."""

    def __init__(self, state_type: type[S], *, quiet_steps: int) -> None:
        self.quiet_steps = quiet_steps
        self._state_type = state_type
        self._state = state_type()

    def judge(self, item: FoldedScalars) -> list[Breach]:
        """Breaches that `item` completes."""
        raise NotImplementedError

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """See `base.Rule`."""
        return self.judge(item) if isinstance(item, FoldedScalars) else []

    def needs_all(self, block: FoldedBlock) -> bool:
        """See `base.Rule`."""
        return not self.reads.isdisjoint(block.names) or (self.reads_losses and has_judged_loss(block))

    def take_block(self, block: FoldedBlock) -> bool:
        """See `base.TakesBlocks`."""
        return False

    def dump(self) -> bytes:
        """State as msgpack."""
        return msgspec.msgpack.encode(self._state)

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        state = msgspec.msgpack.decode(data, type=self._state_type)
        if state.version == STATE_VERSION:
            self._state = state
