"""Rule `never_learned`: the loss is where it began, long after the start.

The level over the last values is compared with the level over the first; the best that it has been counts. A loss
that is or was negative, a log that begins far from step 0, and a loss near 0 are not judged: there no fall is expected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import msgspec

from gradiometer_server.alerting.rules.base import number_text
from gradiometer_server.alerting.rules.baseline import LEARNING_RATE, Pace, Schedule, Window, bounded
from gradiometer_server.alerting.rules.scalar_rule import ScalarRule, ScalarState
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedScalars

_LOSSES = ("train/loss", "loss")
_MAX_CLASSES = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverLearnedDefaults:
    """Defaults of the rule.

    Attributes:
        first_values, earliest_values: values whose median is the start; the higher of the two, because a sparse log
            may show what was learned fast in its first rows only.
        level_values: values whose median is the level.
        min_values, min_step: how long the loss has time.
        share: a fall by less than this share of the start is none.
        least_start: a loss that starts below this has nothing to learn.
        repeat_steps: a lasting state is reported again each so many steps; it must be below `quiet_steps`.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    first_values: int = 50
    earliest_values: int = 5
    level_values: int = 64
    min_values: int = 200
    min_step: int = 500
    share: float = 0.01
    least_start: float = 0.05
    repeat_steps: int = 20
    quiet_steps: int = 40


class _State(ScalarState, kw_only=True):
    schedule: Schedule = msgspec.field(default_factory=Schedule)
    pace: Pace = msgspec.field(default_factory=Pace)
    metric: str = ""
    count: int = 0
    first: list[float] = msgspec.field(default_factory=list)
    start: float = 0.0
    values: list[float] = msgspec.field(default_factory=list)
    best: float = math.inf
    settled: bool = False
    """The loss has fallen, or cannot be judged: nothing more to do in this run."""
    since_breach: int = 0


class NeverLearned(ScalarRule[_State]):
    """See the module's first lines."""

    name = "never_learned"
    reads = frozenset({LEARNING_RATE, *_LOSSES})

    def __init__(self, defaults: NeverLearnedDefaults | None = None) -> None:
        self._defaults = defaults or NeverLearnedDefaults()
        super().__init__(_State, quiet_steps=self._defaults.quiet_steps)
        self._level = Window(self._defaults.level_values)

    def needs_all(self, block: FoldedBlock) -> bool:
        """See `base.Rule`."""
        return not self._state.settled and super().needs_all(block)

    def dump(self) -> bytes:
        """State as msgpack."""
        self._state.values = self._level.values
        return super().dump()

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        super().load(data)
        self._level = Window(self._defaults.level_values, self._state.values)

    def judge(self, item: FoldedScalars) -> list[Breach]:
        """A breach when the loss has had its time, and each `repeat_steps` until it falls."""
        # Hot path: once a loss has fallen, one look at a flag.
        state = self._state
        if state.settled:
            return []
        state.schedule.take(item.step, item.values)
        metric = state.metric or next((name for name in _LOSSES if name in item.values), "")
        if metric not in item.values or item.step <= state.pace.last_step:
            return []
        state.metric = metric
        state.pace.take(item.step)
        value = bounded(item.values[metric])
        return [] if value is None else self._take(item, value)

    def _take(self, item: FoldedScalars, value: float) -> list[Breach]:
        state, defaults = self._state, self._defaults
        state.count += 1
        if value < 0:
            state.settled = True
            return []
        if state.count <= defaults.first_values:
            state.first.append(value)
            if state.count == defaults.first_values:
                earliest = median(state.first[: defaults.earliest_values])
                state.start, state.first = max(median(state.first), earliest), []
                state.settled = state.start < defaults.least_start or state.pace.began_midway
            return []
        self._level.push(value)
        if len(self._level) < defaults.level_values:
            return []
        state.best = min(state.best, self._level.median())
        if state.best < (1 - defaults.share) * state.start:
            state.settled = True
            return []
        return self._judged(item)

    def _judged(self, item: FoldedScalars) -> list[Breach]:
        state, defaults = self._state, self._defaults
        if state.count < defaults.min_values or item.step < defaults.min_step or state.schedule.rising:
            return []
        if state.since_breach:
            state.since_breach = (state.since_breach + 1) % (defaults.repeat_steps + 1)
            if state.since_breach:
                return []
        state.since_breach = 1
        level = self._level.median()
        facts = [
            f"the median of {state.metric} is {number_text(level)}",
            f"it began around {number_text(state.start)}",
        ]
        classes = round(math.exp(min(state.start, 20.0)))
        if 2 <= classes <= _MAX_CLASSES and abs(math.log(classes) - state.start) < 0.02 * state.start:
            facts.append(f"guessing among about {classes:,} classes has that loss")
        return [
            Breach(
                rule=self.name,
                severity=Severity.WARNING,
                step=item.step,
                time_s=item.time_s,
                metric=state.metric,
                value=level,
                baseline=state.start,
                threshold=(1 - defaults.share) * state.start,
                facts=tuple(facts),
            )
        ]
