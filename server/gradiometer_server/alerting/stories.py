"""Stories: episodes that are one incident, in causal order, and the moments at which somebody is to be told of it.

A gradient spike, the loss spike after it and the NaN that ends the run are three episodes and one story. An episode
joins a story if it opens while an episode of it fires and both are about the same kind of trouble.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gradiometer_server.domain.alerts import Breach, Episode, EpisodeState, Severity, severity_rank

_ACUTE: Final = frozenset({
    "grad_norm_spike", "grad_explosion", "loss_spike", "loss_divergence", "loss_rise", "loss_zero", "non_finite",
    "scaler_collapse", "scaler_skips", "lr_anomaly",
})  # fmt: skip
"""Rules whose episodes have one another as causes and effects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A moment at which somebody is to be told: a story began, or became more urgent."""

    step: int
    severity: Severity
    breach: Breach


@dataclass(slots=True, kw_only=True)
class Story:
    """One incident.

    Attributes:
        episodes: newest form of each by id, in the order in which they opened.
        notices: its beginning, and each rise of its severity that calls for something else to be done.
    """

    acute: bool
    episodes: dict[str, Episode] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)

    @property
    def severity(self) -> Severity:
        """The worst that any of its episodes had."""
        return max((episode.severity for episode in self.episodes.values()), key=severity_rank)

    @property
    def first(self) -> Episode:
        """The episode that began earliest: the likely cause of the others."""
        return min(self.episodes.values(), key=lambda episode: episode.first.step)

    @property
    def last_step(self) -> int:
        """The last step in which any of its episodes was seen."""
        return max(episode.last_step for episode in self.episodes.values())

    @property
    def fires(self) -> bool:
        """Whether one of its episodes goes on."""
        return any(episode.state is EpisodeState.FIRING for episode in self.episodes.values())


class Stories:
    """Puts the episodes that an engine returns into stories. Deterministic; kept in the order of their beginnings."""

    def __init__(self) -> None:
        self._stories: list[Story] = []
        self._by_episode: dict[str, Story] = {}
        self._open: Story | None = None
        """The newest acute story."""

    def take(self, episodes: Iterable[Episode]) -> None:
        """What `AlertEngine.observe` returned for one item."""
        for episode in episodes:
            story = self._by_episode.get(episode.alert_id)
            if story is None:
                story = self._by_episode[episode.alert_id] = self._story_of(episode)
            story.episodes[episode.alert_id] = episode
            self._note(story, episode)

    def all(self) -> list[Story]:
        """Every story so far."""
        return list(self._stories)

    def _story_of(self, episode: Episode) -> Story:
        acute = episode.first.rule in _ACUTE
        if acute and self._open is not None and self._open.fires:
            return self._open
        story = Story(acute=acute)
        self._stories.append(story)
        if acute:
            self._open = story
        return story

    def _note(self, story: Story, episode: Episode) -> None:
        told = max((_urgency(notice.severity) for notice in story.notices), default=-1)
        if _urgency(episode.severity) <= told:
            return
        breach = episode.worst if episode.worst.severity is episode.severity else episode.first
        story.notices.append(Notice(step=breach.step, severity=episode.severity, breach=breach))


def _urgency(severity: Severity) -> int:
    """0: to read some day; 1: to look at; 2: to act on. An error after a warning says nothing new to do."""
    return {Severity.INFO: 0, Severity.CRITICAL: 2}.get(severity, 1)
