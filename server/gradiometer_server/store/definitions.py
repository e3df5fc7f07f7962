"""How metrics of a run are to be summarised, as `run.define_metric` said: by name, or by a pattern with `*`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, get_args

from sqlalchemy import Connection, bindparam, func, select

from gradiometer.wire import MAX_NAME_CHARS
from gradiometer_server.store.statements import insert_or_update, of_keys
from gradiometer_server.store.tables import metric_definition
from gradiometer_server.store.values import clean_text

Summary = Literal["last", "min", "max", "mean", "best"]
Goal = Literal["minimize", "maximize"]
SUMMARIES: Final[tuple[Summary, ...]] = get_args(Summary)
GOALS: Final[tuple[Goal, ...]] = get_args(Goal)
MAX_DEFINITIONS: Final = 1000
"""Most of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What was said of a metric.

    Attributes:
        name: of the metric, or a pattern in which `*` stands for any text.
        summary: the value that stands for the whole series; "best": the smallest or largest, by `goal`.
        step_metric: the metric to draw it over; None: the step.
    """

    name: str
    summary: Summary
    goal: Goal | None
    step_metric: str | None


_DEFINE = insert_or_update(metric_definition, ("summary", "goal", "step_metric"))
_OF_RUN = (
    select(metric_definition)
    .where(metric_definition.c.run_id == bindparam("of_run"))
    .order_by(metric_definition.c.name)
)
_OF_RUNS = of_keys(
    lambda among: (
        select(metric_definition).where(among(metric_definition.c.run_id)).order_by(metric_definition.c.name)
    )
)
_OTHERS = (
    select(func.count())
    .select_from(metric_definition)
    .where(
        metric_definition.c.run_id == bindparam("of_run"), metric_definition.c.name != bindparam("of_name")
    )
)


def define_metric(conn: Connection, run_key: int, attributes: Mapping[str, Any]) -> bool:
    """Note a `metric` event; a later one of the same name replaces it. False: it says nothing that can be kept."""
    name = clean_text(str(attributes.get("name", "")))
    summary, goal = attributes.get("summary", "last"), attributes.get("goal")
    step_metric = attributes.get("step_metric")
    if not 0 < len(name) <= MAX_NAME_CHARS or summary not in SUMMARIES or goal not in (None, *GOALS):
        return False
    if summary == "best" and goal is None:
        return False
    if int(conn.execute(_OTHERS, {"of_run": run_key, "of_name": name}).scalar_one()) >= MAX_DEFINITIONS:
        return False
    row = {
        "run_id": run_key, "name": name, "summary": summary, "goal": goal,
        "step_metric": None if step_metric is None else clean_text(str(step_metric))[:MAX_NAME_CHARS],
    }  # fmt: skip
    conn.execute(_DEFINE.on(conn), row)
    return True


def list_definitions(conn: Connection, run_key: int) -> tuple[Definition, ...]:
    """All of a run, by name."""
    return tuple(_definition(row) for row in conn.execute(_OF_RUN, {"of_run": run_key}))


def definitions_of(conn: Connection, run_keys: Collection[int]) -> dict[int, tuple[Definition, ...]]:
    """Those of several runs; runs without any are left out."""
    found: dict[int, tuple[Definition, ...]] = {}
    for row in conn.execute(_OF_RUNS.on(conn), {"keys": list(run_keys)}):
        found[row.run_id] = (*found.get(row.run_id, ()), _definition(row))
    return found


def _definition(row: Any) -> Definition:
    return Definition(name=row.name, summary=row.summary, goal=row.goal, step_metric=row.step_metric)


def definition_for(definitions: Sequence[Definition], name: str) -> Definition | None:
    """The definition that a metric goes by: that of its own name, else the longest pattern that fits."""
    exact = next((one for one in definitions if one.name == name), None)
    if exact is not None:
        return exact
    fitting = [one for one in definitions if "*" in one.name and fnmatchcase(name, _pattern(one.name))]
    return max(fitting, key=lambda one: len(one.name), default=None)


def _pattern(name: str) -> str:
    # Only `*` is special; names may hold brackets and question marks.
    return name.replace("[", "[[]").replace("?", "[?]")


def best_of(goal: Goal | None, low: float | None, high: float | None) -> float | None:
    """The better one of the extremes, None without a goal."""
    if goal is None:
        return None
    return low if goal == "minimize" else high
