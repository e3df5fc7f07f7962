"""Runs every rule over a run's folded items and turns breaches into episodes.

Deterministic: the same items from the same snapshot give the same episodes with the same identities, so a replay
after a crash writes the same rows again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from gradiometer_server.alerting import episodes as life
from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.alerting.rules import make_rules
from gradiometer_server.alerting.rules.base import Rule, TakesBlocks
from gradiometer_server.domain.alerts import Breach, Episode, EpisodeState
from gradiometer_server.domain.folded import Folded, FoldedBlock, FoldedEvent, FoldedLayers, FoldedStep

_ENGINE = "engine"
_VERSION = 1


class _Clock(msgspec.Struct, kw_only=True):
    """Where the run is: the newest attempt and its newest step."""

    version: int = _VERSION
    attempt: int = 0
    step: int = -1
    quiet: dict[str, dict[str, int]] = {}
    """By rule and key: reported steps since the last breach of a firing episode."""


class AlertEngine:
    """Alert state of one run. Make it with `restore`; feed it with `observe`; persist it with `snapshot`."""

    def __init__(self) -> None:
        self._rules: list[Rule] = make_rules()
        self._quiet_steps = {rule.name: rule.quiet_steps for rule in self._rules}
        self._history = LayerHistory()
        self._clock = _Clock()
        self._firing: dict[tuple[str, str], Episode] = {}

    @classmethod
    def restore(cls, states: Sequence[tuple[str, str, bytes]], episodes: Sequence[Episode]) -> AlertEngine:
        """Continue from what `snapshot` and `observe` gave at one fold offset; both empty: a fresh engine.

        Args:
            states: (rule, key, bytes) as `snapshot` returned them; states of unknown rules are ignored.
            episodes: the run's episodes as stored; only firing ones matter.
        """
        engine = cls()
        stored = {(rule, key): data for rule, key, data in states}
        for rule in engine._rules:
            if data := stored.get((rule.name, "")):
                rule.load(data)
        if data := stored.get((_ENGINE, "layers")):
            engine._history.load(data)
        if data := stored.get((_ENGINE, "")):
            clock = msgspec.msgpack.decode(data, type=_Clock)
            engine._clock = clock if clock.version == _VERSION else _Clock()
        engine._firing = {
            (episode.first.rule, episode.first.key): episode
            for episode in episodes
            if episode.state is EpisodeState.FIRING and episode.first.rule in engine._quiet_steps
        }
        return engine

    def snapshot(self) -> list[tuple[str, str, bytes]]:
        """State of every rule and of the engine, as (rule, key, msgpack bytes)."""
        states = [(rule.name, "", rule.dump()) for rule in self._rules]
        states.append((_ENGINE, "layers", self._history.dump()))
        states.append((_ENGINE, "", msgspec.msgpack.encode(self._clock)))
        return states

    def observe(self, item: Folded) -> list[Episode]:
        """Judge one item.

        Returns:
            Every episode that opened, was extended or resolved, each once and in its newest form. An episode that
            lasts is returned at each breach: write it once per commit.
        """
        changed: dict[str, Episode] = {}
        if item.attempt < self._clock.attempt:
            # A straggler of an attempt that has been superseded: its baselines are gone, and nobody can act on it.
            return []
        first = item.at(0) if isinstance(item, FoldedBlock) else item
        if item.attempt > self._clock.attempt:
            self._start_attempt(first, changed)
        if isinstance(item, FoldedBlock):
            self._judge_block(item, changed)
        else:
            self._ask(item, self._rules, changed)
            if isinstance(item, FoldedLayers):
                self._history.add(item)
            self._advance(item, changed)
        return list(changed.values())

    def _judge_block(self, block: FoldedBlock, changed: dict[str, Episode]) -> None:
        """# Hot path: of usual steps, the first and the last two leave what a rule remembers as all of them would."""
        num_rows = len(block.steps_S)
        few = {0, max(0, num_rows - 2), num_rows - 1}
        careful = [rule for rule in self._rules if rule.needs_all(block) and not _takes(rule, block)]
        if not careful:
            for row in sorted(few):
                self._ask(block.at(row), self._rules, changed)
            self._advance_block(block, changed)
            return
        for row in range(num_rows):
            step = block.at(row)
            self._ask(step, self._rules if row in few else careful, changed)
            self._advance(step, changed)

    def _ask(self, item: FoldedStep, rules: Sequence[Rule], changed: dict[str, Episode]) -> None:
        for rule in rules:
            for breach in rule.observe(item, self._history):
                self._take(item.attempt, breach, changed)

    def _start_attempt(self, item: FoldedStep, changed: dict[str, Episode]) -> None:
        """A relaunch learns afresh: its baselines may differ, and what fired before has ended with its process."""
        for episode in self._firing.values():
            done = life.resolved(episode, step=episode.last_step, time_s=item.time_s)
            changed[done.alert_id] = done
        self._firing.clear()
        self._rules = make_rules()
        self._history = LayerHistory()
        self._clock = _Clock(attempt=item.attempt)

    def _take(self, attempt: int, breach: Breach, changed: dict[str, Episode]) -> None:
        place = (breach.rule, breach.key)
        firing = self._firing.get(place)
        episode = life.opened(attempt, breach) if firing is None else life.extended(firing, breach)
        self._firing[place] = episode
        self._clock.quiet.setdefault(breach.rule, {})[breach.key] = 0
        changed[episode.alert_id] = episode

    def _advance(self, item: FoldedStep, changed: dict[str, Episode]) -> None:
        """Move the step clock and resolve what has been quiet. Events do not move it: users choose their steps.

        Quiet steps are counted as reported, so that a run that reports each hundredth step has whole episodes too.
        """
        if isinstance(item, FoldedEvent) or item.step <= self._clock.step:
            return
        self._clock.step = item.step
        for (rule, key), episode in list(self._firing.items()):
            if episode.last_step >= item.step:
                continue
            quiet = self._clock.quiet.setdefault(rule, {})
            quiet[key] = quiet.get(key, 0) + 1
            if quiet[key] > self._quiet_steps[rule]:
                self._resolve(episode, item.step, item.time_s, changed)

    def _advance_block(self, block: FoldedBlock, changed: dict[str, Episode]) -> None:
        """What `_advance` does at each of these steps, of which none is a breach."""
        new = int(np.searchsorted(block.steps_S, self._clock.step, side="right"))
        if new == len(block.steps_S):
            return
        self._clock.step = int(block.steps_S[-1])
        for (rule, key), episode in list(self._firing.items()):
            first = max(new, int(np.searchsorted(block.steps_S, episode.last_step, side="right")))
            quiet = self._clock.quiet.setdefault(rule, {})
            row = first + self._quiet_steps[rule] - quiet.get(key, 0)
            if row < len(block.steps_S):
                self._resolve(episode, int(block.steps_S[row]), float(block.times_S[row]), changed)
            else:
                quiet[key] = quiet.get(key, 0) + len(block.steps_S) - first

    def _resolve(self, episode: Episode, step: int, time_s: float, changed: dict[str, Episode]) -> None:
        done = life.resolved(episode, step=step, time_s=time_s)
        changed[done.alert_id] = done
        rule, key = episode.first.rule, episode.first.key
        del self._firing[rule, key], self._clock.quiet[rule][key]


def _takes(rule: Rule, block: FoldedBlock) -> bool:
    return isinstance(rule, TakesBlocks) and rule.take_block(block)
