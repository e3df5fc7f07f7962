"""Runs the rows of one log through the alert engine, as the server does with what an agent sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradiometer_server.alerting.engine import AlertEngine
from gradiometer_server.alerting.stories import Stories, Story
from gradiometer_server.domain.folded import FoldedEvent, FoldedScalars
from gradiometer_server.lint.rows import Row


@dataclass(slots=True, kw_only=True)
class Judgement:
    """What the rules said of one log.

    Attributes:
        num_rows: rows that were read.
        restarts: first step of each part of the log that goes back to steps it had passed.
        stories: what happened, in the order in which it began.
    """

    num_rows: int = 0
    restarts: list[int] = field(default_factory=list)
    stories: list[Story] = field(default_factory=list)


def judge(rows: Iterable[Row]) -> Judgement:
    """The stories that the rules find in `rows`."""
    engine, stories, attempts = AlertEngine.restore([], []), Stories(), _Attempts()
    result = Judgement()
    for row in rows:
        result.num_rows += 1
        if attempts.restarts_with(row):
            result.restarts.append(row.step)
        item = FoldedScalars(attempt=attempts.current, step=row.step, time_s=0.0, values=row.values)
        stories.take(engine.observe(item))
    # Some rules wait for what may still come; now nothing will.
    end = FoldedEvent(attempt=attempts.current, rank=0, kind="exit", time_s=0.0, step=None, attributes={})
    stories.take(engine.observe(end))
    result.stories = stories.all()
    return result


class _Attempts:
    """Tells a restart from a late row: a restart brings a metric again for steps that it had passed.

    Logs that were joined by metric, or whose evaluations are written after the next steps, go back too.
    """

    def __init__(self) -> None:
        self.current = 1
        self._last_steps: dict[str, int] = {}

    def restarts_with(self, row: Row) -> bool:
        """Takes in `row`; whether it begins a new attempt."""
        goes_back = self._goes_back(row.values, row.step)
        if goes_back:
            self.current += 1
            self._last_steps.clear()
        self._last_steps.update(dict.fromkeys(row.values, row.step))
        return goes_back

    def _goes_back(self, values: Mapping[str, float], step: int) -> bool:
        return any(self._last_steps.get(name, step) > step for name in values)
