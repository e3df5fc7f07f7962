"""`run.define_metric`: how a metric is to be summarised and over what it is to be drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gradiometer import wire
from gradiometer.drops import Drops
from gradiometer.guard import Guard
from gradiometer.plain import shown

SUMMARIES: Final = ("last", "min", "max", "mean", "best")
GOALS: Final = {"minimize": "minimize", "min": "minimize", "maximize": "maximize", "max": "maximize"}
INVALID: Final = "a definition of a metric is not valid"
_IMPLIED: Final = {"min": "minimize", "max": "maximize"}


def definition_problem(name: object, summary: object, goal: object, step_metric: object) -> str | None:
    """Why a metric cannot be defined so, in words, or None."""
    for what, text in (("name", name), ("step_metric", step_metric)):
        if text is None and what == "step_metric":
            continue
        problem = wire.name_problem(text) if isinstance(text, str) else "it is no text"
        if problem is not None:
            return f"{what} {shown(text)[:60]}: {problem}"
    if summary not in SUMMARIES:
        return f"summary {shown(summary)[:40]} is none of {', '.join(SUMMARIES)}"
    if goal is not None and goal not in GOALS:
        return f"goal {shown(goal)[:40]} is neither minimize nor maximize"
    if summary == "best" and goal is None:
        return "summary 'best' needs a goal: minimize or maximize"
    return None


class DefinesMetrics:
    """The part of a run that says what its metrics mean."""

    _feeder: Any
    _guard: Guard
    _drops: Drops
    _event: Callable[..., None]

    def define_metric(
        self, name: str, summary: str = "last", *, goal: str | None = None, step_metric: str | None = None
    ) -> None:
        """Say how `name` is to be summarised; before or after it is logged, and again to change it. Never raises.

        Args:
            name: of the metric, or a pattern in which `*` stands for any text: "val/*".
            summary: the value that stands for the run: "last", "min", "max", "mean", or "best", the smallest or the
                largest by `goal`.
            goal: "minimize" or "maximize"; with summary "min" or "max" it goes without saying.
            step_metric: the metric to draw it over instead of the step, such as "epoch" or "tokens".
        """
        if self._feeder is not None:
            self._guard.tolerate("define_metric", self._define, name, summary, goal, step_metric)

    def _define(self, name: str, summary: str, goal: str | None, step_metric: str | None) -> None:
        problem = definition_problem(name, summary, goal, step_metric)
        if problem is not None:
            self._drops.add(INVALID, None, detail=problem)
            return
        attributes = {
            "name": name,
            "summary": summary,
            "goal": _IMPLIED.get(summary) if goal is None else GOALS[goal],
            "step_metric": step_metric,
        }
        self._event("metric", attributes)
