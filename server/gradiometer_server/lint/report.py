"""Writes what was found in logs: as a table for people, as JSON or CSV for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gradiometer_server.alerting.explain import explain
from gradiometer_server.alerting.stories import Notice, Story
from gradiometer_server.domain.alerts import Episode, Severity, severity_rank
from gradiometer_server.lint.judge import Judgement

CSV_COLUMNS: Final = ("name", "step", "metric", "kind", "severity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One log and what the rules said of it. `name` is the file's stem."""

    name: str
    judgement: Judgement


def alarms(report: Report, least: Severity = Severity.WARNING) -> list[Story]:
    """Its stories of at least that severity."""
    return [
        story for story in report.judgement.stories if severity_rank(story.severity) >= severity_rank(least)
    ]


def as_csv(reports: Iterable[Report]) -> str:
    """One line for each notice: a story's beginning, and each rise of it."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for report in reports:
        for story in report.judgement.stories:
            writer.writerows(_csv_row(report.name, notice) for notice in story.notices)
    return file.getvalue()


def _csv_row(name: str, notice: Notice) -> tuple[str, int, str, str, str]:
    breach = notice.breach
    return name, notice.step, breach.metric, breach.rule, notice.severity.value


def as_json(reports: Iterable[Report]) -> str:
    """A list with one object for each log, with all its stories and their texts."""
    return json.dumps([_log(report) for report in reports], indent=2, allow_nan=False) + "\n"


def _log(report: Report) -> dict[str, Any]:
    return {
        "name": report.name,
        "num_rows": report.judgement.num_rows,
        "restarts": report.judgement.restarts,
        "stories": [_story(story) for story in report.judgement.stories],
    }


def _story(story: Story) -> dict[str, Any]:
    return {
        "severity": story.severity.value,
        "first_step": story.first.first.step,
        "last_step": story.last_step,
        "notices": [
            {"step": notice.step, "severity": notice.severity.value, "kind": notice.breach.rule}
            for notice in story.notices
        ],
        "episodes": [_episode(episode) for episode in story.episodes.values()],
    }


def _episode(episode: Episode) -> dict[str, Any]:
    text = explain(episode)
    return {
        "kind": episode.first.rule,
        "metric": episode.first.metric,
        "severity": episode.severity.value,
        "first_step": episode.first.step,
        "last_step": episode.last_step,
        "count": episode.count,
        "value": _number(episode.first.value),
        "baseline": _number(episode.first.baseline),
        "threshold": _number(episode.first.threshold),
        "title": text.title,
        "explanation": text.explanation,
        "advice": text.advice,
    }


def _number(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: they are written as words."""
    if value is None or value - value == 0:
        return value
    return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")


def as_table(reports: Iterable[Report]) -> str:
    """For people: each story with the texts that the page shows."""
    lines: list[str] = []
    for report in reports:
        lines += _heading(report)
        for story in report.judgement.stories:
            lines += _told(story)
    return "\n".join(lines) + "\n" if lines else ""


def _heading(report: Report) -> list[str]:
    rows, found = report.judgement.num_rows, len(alarms(report))
    verdict = f"{found} alert{'s' * (found != 1)}" if found else "no alert"
    lines = [f"{report.name}: {rows:,} row{'s' * (rows != 1)}, {verdict}"]
    for step in report.judgement.restarts[:5]:
        lines.append(f"  starts again at step {step}: from there on, what is usual is learned anew")
    return lines


def _told(story: Story) -> list[str]:
    texts = [(episode, explain(episode)) for episode in story.episodes.values()]
    lines = []
    for index, (episode, text) in enumerate(texts):
        mark = f"  {episode.severity.value:<8} " if index == 0 else f"    then {episode.severity.value}: "
        lines += [f"{mark}{text.title}", f"           {text.explanation}"]
    return [*lines, f"           First: {texts[0][1].advice}"]


FORMATS: Final[dict[str, Callable[[Sequence[Report]], str]]] = {
    "table": as_table,
    "json": as_json,
    "csv": as_csv,
}
