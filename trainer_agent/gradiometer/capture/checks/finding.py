"""What a check found, and how it is told: once per run and check, with a count that goes on in powers of ten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gradiometer import wire
from gradiometer.records import Records

_MAX_TEXT_CHARS: Final = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One mistake, in the words that a person reads.

    Attributes:
        check: stable id of the check, e.g. `missing_zero_grad`.
        title: one line. `text`: what happened and why it matters. `advice`: what to do first.
        severity: info, warning, error or critical.
        metric: the chart that shows its effect best.
        facts: numbers and names behind it.
    """

    check: str
    title: str
    text: str
    advice: str
    severity: str = "warning"
    metric: str = "grad/norm"
    facts: Mapping[str, Any] = field(default_factory=dict)


class Tally:
    """How often one check of one watch was true. Agent thread only."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> bool:
        """One more; whether it is to be told: the 1st, 10th, 100th, ... time."""
        self.count += 1
        told = 1
        while told < self.count:
            told *= 10
        return told == self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """A check to be judged on the agent's thread, where its values may be waited for.

    Attributes:
        judge: the finding, or None if all is well.
        watch: name of the watch; empty for the first.
    """

    step: int
    time: float
    watch: str
    tally: Tally
    judge: Callable[[], Finding | None]

    def write(self, records: Records) -> None:
        """See `Report`."""
        found = self.judge()
        if found is None or not self.tally.add():
            return
        attributes: dict[str, Any] = {
            "check": found.check,
            "watch": self.watch,
            "title": found.title[:_MAX_TEXT_CHARS],
            "text": found.text[:_MAX_TEXT_CHARS],
            "advice": found.advice[:_MAX_TEXT_CHARS],
            "severity": found.severity,
            "metric": found.metric,
            "facts": dict(found.facts),
            "count": self.tally.count,
        }
        records.add_event(wire.Event(kind="check", time=self.time, step=self.step, attributes=attributes))
