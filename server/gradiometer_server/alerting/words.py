"""The words that the texts of all alerts share."""

from __future__ import annotations

from dataclasses import dataclass

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.domain.alerts import Breach, Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Text of an alert: `title` is one line, `explanation` and `advice` are a few sentences each."""

    title: str
    explanation: str
    advice: str


def first_layer(breach: Breach) -> str:
    """Name of the layer that is the likely origin."""
    return breach.layers[0] if breach.layers else "an unknown layer"


def in_layer(breach: Breach) -> str:
    """Where it began, for the end of a title; empty where that is not known."""
    if not breach.layers or not breach.origin:
        return ""
    how = "first in"
    if breach.origin == "growth":
        how = "mostly in" if breach.rule == "grad_norm_spike" else "suspect"
    return f", {how} {breach.layers[0]}"


def on_rank(breach: Breach) -> str:
    """The first rank, for the end of a title."""
    return f", rank {breach.ranks[0]}" if breach.ranks else ""


def facts(breach: Breach) -> str:
    """The facts as a sentence."""
    return f"{capital(breach.facts)}." if breach.facts else ""


def capital(facts: tuple[str, ...]) -> str:
    """Facts joined, the first letter large unless it begins the name of a metric."""
    text = "; ".join(facts)
    return text[:1].upper() + text[1:] if text and not text.startswith(("train/", "grad/", "loss")) else text


def since(episode: Episode) -> str:
    """How often and until when it was seen; empty for a single time."""
    first = episode.first.step
    if episode.count == 1:
        return ""
    ended = f", quiet since step {episode.resolved_step}" if episode.resolved_step is not None else ""
    return f"Seen {episode.count} times from step {first} to step {episode.last_step}{ended}."


def sentences(*parts: str) -> str:
    """The parts that say something, one after the other."""
    return " ".join(part for part in parts if part)


def times(breach: Breach) -> str:
    """How many times its baseline a value is, for a title."""
    if breach.value is None or not breach.baseline:
        return "far above"
    return f"is {number_text(breach.value / breach.baseline)} times"
