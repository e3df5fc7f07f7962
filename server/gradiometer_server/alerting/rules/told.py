"""What the rules share that pass on what somebody else has judged: an event becomes a breach at the run's step."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedEvent, FoldedStep

MAX_TEXT_CHARS: Final = 4000
_VERSION: Final = 1


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    step: int = 0


class ToldRule:
    """Turns events of one kind into breaches; other items only tell which step the run is at."""

    event_kind: ClassVar[str]

    def __init__(self) -> None:
        self._state = _State()

    def breach(self, event: FoldedEvent, step: int) -> Breach:
        """What `event` says; `step` is its own, or else the run's."""
        raise NotImplementedError

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """See `base.Rule`."""
        if not isinstance(item, FoldedEvent):
            self._state.step = max(self._state.step, item.step)
            return []
        if item.kind != self.event_kind:
            return []
        return [self.breach(item, self._state.step if item.step is None else item.step)]

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


def severity_of(value: object) -> Severity:
    """The severity that was told; a warning if it is none."""
    try:
        return Severity(str(value).lower())
    except ValueError:
        return Severity.WARNING
