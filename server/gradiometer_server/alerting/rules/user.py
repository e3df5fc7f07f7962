"""Rule `user`: what the training code itself reported with `run.alert()`, passed on as given."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import Folded, FoldedEvent

_VERSION = 1
_MAX_TEXT_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAlertDefaults:
    """`quiet_steps`: an alert with the same title within so many steps extends the episode."""

    quiet_steps: int = 200


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    step: int = 0


class UserAlert:
    """Turns `alert` events into breaches; the title separates episodes."""

    name = "user"

    def __init__(self, defaults: UserAlertDefaults | None = None) -> None:
        self.quiet_steps = (defaults or UserAlertDefaults()).quiet_steps
        self._state = _State()

    def observe(self, item: Folded, history: LayerHistory) -> list[Breach]:
        """A breach for each `alert` event; other items only tell which step the run is at."""
        if not isinstance(item, FoldedEvent):
            self._state.step = max(self._state.step, item.step)
            return []
        if item.kind != "alert":
            return []
        title = str(item.attributes.get("title") or "Alert from the training code")[:_MAX_TEXT_CHARS]
        text = str(item.attributes.get("text") or "")[:_MAX_TEXT_CHARS]
        return [
            Breach(
                rule=self.name,
                key=title,
                severity=_severity(item.attributes.get("severity")),
                step=self._state.step if item.step is None else item.step,
                time_s=item.time_s,
                metric=str(item.attributes.get("metric") or "train/loss"),
                ranks=(item.rank,),
                facts=(title, text),
            )
        ]

    def dump(self) -> bytes:
        """State as msgpack."""
        return msgspec.msgpack.encode(self._state)

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        state = msgspec.msgpack.decode(data, type=_State)
        if state.version == _VERSION:
            self._state = state


def _severity(value: object) -> Severity:
    try:
        return Severity(str(value).lower())
    except ValueError:
        return Severity.WARNING
