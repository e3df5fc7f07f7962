"""Life of an episode: opened by a breach, extended by later ones, resolved by quiet steps."""

from __future__ import annotations

import math
from dataclasses import replace
from hashlib import blake2b

from gradiometer_server.alerting.rules.base import MAX_NAMED_LAYERS
from gradiometer_server.domain.alerts import Breach, Episode, EpisodeState, severity_rank

_MAX_RANKS = 64


def alert_id(attempt: int, breach: Breach) -> str:
    """Identity of the episode that `breach` opens: equal on every replay, safe in a URL."""
    base = f"{attempt}-{breach.rule}-{breach.step}"
    if not breach.key:
        return base
    return f"{base}-{blake2b(breach.key.encode(), digest_size=4).hexdigest()}"


def opened(attempt: int, breach: Breach) -> Episode:
    """A new firing episode."""
    return Episode(
        alert_id=alert_id(attempt, breach),
        attempt=attempt,
        state=EpisodeState.FIRING,
        first=breach,
        worst=breach,
        opened_s=breach.time_s,
        last_step=breach.step,
        count=1,
        severity=breach.severity,
        layers=breach.layers[:MAX_NAMED_LAYERS],
        num_layers=breach.num_layers or len(breach.layers),
        ranks=breach.ranks[:_MAX_RANKS],
        facts=breach.facts,
    )


def extended(episode: Episode, breach: Breach) -> Episode:
    """`episode` after one more breach of the same rule and key.

    A breach of the first step again is better knowledge of the same moment (its layers arrived after its loss): it
    replaces the first breach and does not count twice. Only that moment tells the origin; later steps are
    aftermath, so their facts and layer order never displace the first ones.
    """
    same_step = breach.step == episode.first.step
    first = _better_known(episode.first, breach) if same_step else episode.first
    return replace(
        episode,
        first=first,
        worst=breach if _is_worse(breach, episode.worst) else episode.worst,
        last_step=max(episode.last_step, breach.step),
        count=episode.count + (0 if breach.step <= episode.last_step else 1),
        severity=max(episode.severity, breach.severity, key=severity_rank),
        layers=_union(first.layers, episode.layers, breach.layers)[:MAX_NAMED_LAYERS],
        num_layers=max(episode.num_layers, breach.num_layers or len(breach.layers)),
        ranks=_union_ranks(first.ranks, episode.ranks, breach.ranks)[:_MAX_RANKS],
        facts=first.facts,
    )


def resolved(episode: Episode, *, step: int, time_s: float) -> Episode:
    """`episode` after it has been quiet for long enough."""
    return replace(episode, state=EpisodeState.RESOLVED, resolved_step=step, resolved_s=time_s)


def _better_known(first: Breach, again: Breach) -> Breach:
    richer = (
        again if (bool(again.layers), len(again.facts)) >= (bool(first.layers), len(first.facts)) else first
    )
    severity = max(first.severity, again.severity, key=severity_rank)
    ranks = richer.ranks or first.ranks or again.ranks
    return replace(richer, severity=severity, time_s=first.time_s, ranks=ranks)


def _is_worse(breach: Breach, worst: Breach) -> bool:
    if severity_rank(breach.severity) != severity_rank(worst.severity):
        return severity_rank(breach.severity) > severity_rank(worst.severity)
    if breach.step == worst.step:
        return len(breach.facts) >= len(worst.facts)
    if breach.value is None or worst.value is None or not math.isfinite(worst.value):
        return False
    return _distance(breach) > _distance(worst)


def _distance(breach: Breach) -> float:
    """How far the value is beyond what was usual; rules that alert on small values have a baseline above."""
    if breach.value is None or not math.isfinite(breach.value):
        return math.inf
    below = breach.baseline is not None and breach.value < breach.baseline
    return -breach.value if below else breach.value


def _union(*groups: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))


def _union_ranks(*groups: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(rank for group in groups for rank in group))
