"""Rule `user`: what the training code itself reported with `run.alert()`, passed on as given."""

from __future__ import annotations

from dataclasses import dataclass

from gradiometer_server.alerting.rules.told import MAX_TEXT_CHARS, ToldRule, severity_of
from gradiometer_server.domain.alerts import Breach
from gradiometer_server.domain.folded import FoldedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAlertDefaults:
    """`quiet_steps`: an alert with the same title within so many steps extends the episode."""

    quiet_steps: int = 200


class UserAlert(ToldRule):
    """Turns `alert` events into breaches; the title separates episodes."""

    name = "user"
    event_kind = "alert"

    def __init__(self, defaults: UserAlertDefaults | None = None) -> None:
        super().__init__()
        self.quiet_steps = (defaults or UserAlertDefaults()).quiet_steps

    def breach(self, event: FoldedEvent, step: int) -> Breach:
        """See `ToldRule`."""
        title = str(event.attributes.get("title") or "Alert from the training code")[:MAX_TEXT_CHARS]
        text = str(event.attributes.get("text") or "")[:MAX_TEXT_CHARS]
        return Breach(
            rule=self.name,
            key=title,
            severity=severity_of(event.attributes.get("severity")),
            step=step,
            time_s=event.time_s,
            metric=str(event.attributes.get("metric") or "train/loss"),
            ranks=(event.rank,),
            facts=(title, text),
        )
