"""Alerts as values: what a rule found, and the episode that a person reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is; ordered by `severity_rank`."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


def severity_rank(severity: Severity) -> int:
    """0 for info up to 3 for critical."""
    return list(Severity).index(severity)


class EpisodeState(StrEnum):
    """Life of an alert after its breach was confirmed."""

    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One evaluation of a rule that holds.

    Attributes:
        rule: rule name, e.g. `non_finite`.
        key: sub-key that separates episodes of one rule (usually ""); (run, rule, key) has one episode at a time.
        metric: the metric to draw the alert on.
        value, baseline, threshold: what was seen, what was usual, and the bound that it crossed; None where a rule
            has no such number.
        layers: affected layers, the likely origin first; ranks likewise.
        origin: how the first layer was found: `forward`, `backward`, `growth`, or "" when no layer is involved.
        facts: short phrases for the explanation, in causal order, e.g. "train/loss is NaN".
    """

    rule: str
    severity: Severity
    step: int
    time_s: float
    metric: str
    value: float | None = None
    baseline: float | None = None
    threshold: float | None = None
    key: str = ""
    layers: tuple[str, ...] = ()
    num_layers: int = 0
    ranks: tuple[int, ...] = ()
    origin: str = ""
    facts: tuple[str, ...] = ()
    rule_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One alert as stored and shown: opened, extended, resolved.

    `alert_id` is derived from (attempt, rule, key, first step), so that a replay after a crash writes the same row.
    """

    alert_id: str
    attempt: int
    state: EpisodeState
    first: Breach
    worst: Breach
    opened_s: float
    last_step: int
    count: int
    severity: Severity
    layers: tuple[str, ...]
    num_layers: int
    ranks: tuple[int, ...]
    facts: tuple[str, ...]
    resolved_step: int | None = None
    resolved_s: float | None = None
