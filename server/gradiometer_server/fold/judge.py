"""Feeds the alert engine and keeps what it must find again after a crash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradiometer_server.alerting.engine import AlertEngine
from gradiometer_server.domain.alerts import Episode, EpisodeState
from gradiometer_server.domain.folded import Folded

RuleState = tuple[str, str, bytes]
"""(rule, key, state)."""


class Judge:
    """Alert rules of one run.

    The episodes that fire are part of the snapshot: a replay must continue from the episodes as they were at the
    fold's offset, not from the newer ones in the store, or it would extend them twice.
    """

    def __init__(self, states: Sequence[RuleState], firing: Iterable[Episode]) -> None:
        self._firing = {episode.alert_id: episode for episode in firing}
        self._engine = AlertEngine.restore(states, list(self._firing.values()))

    def observe(self, items: Iterable[Folded]) -> list[Episode]:
        """Episodes that these items opened, extended or resolved, each once in its newest form."""
        changed: dict[str, Episode] = {}
        for item in items:
            for episode in self._engine.observe(item):
                changed[episode.alert_id] = episode
        for alert_id, episode in changed.items():
            if episode.state is EpisodeState.FIRING:
                self._firing[alert_id] = episode
            else:
                self._firing.pop(alert_id, None)
        return list(changed.values())

    def snapshot(self) -> list[RuleState]:
        """States of the rules, to be stored with the fold's offsets."""
        return self._engine.snapshot()

    def firing(self) -> tuple[Episode, ...]:
        """Episodes that belong to the snapshot."""
        return tuple(self._firing.values())
