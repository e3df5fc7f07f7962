"""Rule `check`: a mistake in the training loop that the agent has proved (missing `zero_grad`, clip before unscale, ...).

One episode per check and watch. It stays open until the process is replaced: the mistake is in the code, so a few
quiet steps prove nothing, and a relaunch starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradiometer_server.alerting.rules.told import MAX_TEXT_CHARS, ToldRule, severity_of
from gradiometer_server.domain.alerts import Breach
from gradiometer_server.domain.folded import FoldedEvent

_MAX_KEY_CHARS = 500
_MAX_FACT_CHARS = 500
_MAX_FACTS = 20
_NEVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckDefaults:
    """`quiet_steps`: more than a run has steps, see above."""

    quiet_steps: int = _NEVER


class Check(ToldRule):
    """Turns `check` events into breaches; check and watch separate episodes, the value counts how often it was true."""

    name = "check"
    event_kind = "check"

    def __init__(self, defaults: CheckDefaults | None = None) -> None:
        super().__init__()
        self.quiet_steps = (defaults or CheckDefaults()).quiet_steps

    def breach(self, event: FoldedEvent, step: int) -> Breach:
        """See `ToldRule`."""
        attributes = event.attributes
        watch = _text(attributes.get("watch"))
        key = f"{_text(attributes.get('check'))} {watch}".strip()[:_MAX_KEY_CHARS]
        title = _text(attributes.get("title")) or f"The check {key} found a mistake in the training loop"
        if watch:
            title = f"{title} ({watch})"
        return Breach(
            rule=self.name,
            key=key,
            severity=severity_of(attributes.get("severity")),
            step=step,
            time_s=event.time_s,
            metric=_text(attributes.get("metric")) or "train/loss",
            value=_count(attributes.get("count")),
            ranks=(event.rank,),
            facts=(
                title,
                _text(attributes.get("text")),
                _text(attributes.get("advice")),
                *_facts(attributes.get("facts")),
            ),
        )


def _text(value: object) -> str:
    return str(value)[:MAX_TEXT_CHARS] if isinstance(value, str) else ""


def _count(value: object) -> float:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else 1.0


def _facts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, dict):
        return ()
    return tuple(
        f"{name} = {_shown(fact)}"[:_MAX_FACT_CHARS] for name, fact in list(value.items())[:_MAX_FACTS]
    )


def _shown(fact: object) -> str:
    if isinstance(fact, float):
        return f"{fact:.6g}"
    return ", ".join(map(str, fact)) if isinstance(fact, (list, tuple)) else str(fact)
