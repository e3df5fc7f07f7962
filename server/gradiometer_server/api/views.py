"""Stored values in their public form: plain dictionaries that `domain.jsonable.dumps` can encode. Pure.

The shapes are published by `api/schemas.py`; field by field they are those of docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gradiometer_server.alerting.explain import explain
from gradiometer_server.domain.alerts import Episode
from gradiometer_server.domain.folded import Layout
from gradiometer_server.domain.jsonable import float_to_json, json_safe
from gradiometer_server.store.dumps import DumpRow
from gradiometer_server.store.run_rows import RunRow, SourceRow

Json = dict[str, Any]


def run_view(
    run: RunRow,
    *,
    latest: Mapping[str, float] | None = None,
    last_step: int | None = None,
    summary: Mapping[str, float] | None = None,
) -> Json:
    """**Run**. `latest` and `last_step`, where given, are newer than what the row knows."""
    steps = [step for step in (run.last_step, last_step) if step is not None]
    return {
        "id": run.id,
        "project": run.project,
        "name": run.name,
        "state": run.state,
        "created_s": run.created_s,
        "updated_s": run.updated_s,
        "finished_s": run.finished_s,
        "attempts": run.attempts,
        "world_size": run.world_size,
        "last_step": max(steps, default=None),
        "tags": list(run.tags),
        "notes": run.notes,
        "group": run.group,
        "exit": exit_view(run.exit),
        "latest": {name: float_to_json(value) for name, value in {**run.latest, **(latest or {})}.items()},
        "summary": {name: float_to_json(value) for name, value in (summary or {}).items()},
        "alerts": {"firing": run.alerts["firing"], "total": run.alerts["total"]},
        "rejected_records": run.rejected_records,
        "dropped_reports": run.dropped_reports,
        "thinned_s": run.thinned_s,
    }


def exit_view(found: Mapping[str, Any] | None) -> Json | None:
    """How something ended, or None while it runs."""
    if found is None:
        return None
    return {
        "code": found.get("code"),
        "signal": found.get("signal"),
        "reason": found.get("reason") or "",
        "inferred": bool(found.get("inferred")),
        "exception": found.get("exception"),
    }


def detail_view(
    run: Json,
    row: RunRow,
    sources: Iterable[SourceRow],
    layouts: Iterable[Layout],
    dumps: Iterable[DumpRow] = (),
) -> Json:
    """**Run** `run`, with what does not fit a list."""
    return {
        **run,
        "config": json_safe(row.config),
        "sources": [source_view(source) for source in sources],
        "unavailable": dict(row.unavailable),
        "layouts": [
            {"layout_id": layout.layout_id, "layers": list(layout.names), "numels": list(layout.numels)}
            for layout in layouts
        ],
        "dumps": [asdict(dump) for dump in dumps],
    }


def source_view(source: SourceRow) -> Json:
    """One writer of a run."""
    return {
        "rank": source.rank,
        "attempt": source.ordinal,
        "world_size": source.world_size,
        "host": source.host,
        "pid": source.pid,
        "started_s": source.started_s,
        "start_step": source.start_step,
        "last_step": source.last_step,
        "acked_seq": source.acked_seq,
        "folded_seq": source.folded_seq,
        "dropped_reports": source.dropped_reports,
        "environment": {str(key): str(value) for key, value in source.environment.items()},
        "exit": exit_view(source.exit),
    }


def alert_view(run_id: str, episode: Episode) -> Json:
    """**Alert**."""
    first, worst, text = episode.first, episode.worst, explain(episode)
    return {
        "id": episode.alert_id,
        "run": run_id,
        "attempt": episode.attempt,
        "rule": first.rule,
        "rule_version": first.rule_version,
        "severity": episode.severity.value,
        "state": episode.state.value,
        "metric": first.metric,
        "title": text.title,
        "explanation": text.explanation,
        "advice": text.advice,
        "first_step": first.step,
        "last_step": episode.last_step,
        "opened_s": episode.opened_s,
        "resolved_s": episode.resolved_s,
        "resolved_step": episode.resolved_step,
        "count": episode.count,
        "value": float_to_json(first.value),
        "worst_value": float_to_json(worst.value),
        "baseline": float_to_json(first.baseline),
        "threshold": float_to_json(first.threshold),
        "layer": episode.layers[0] if episode.layers else None,
        "layers": list(episode.layers),
        "num_layers": episode.num_layers,
        "rank": episode.ranks[0] if episode.ranks else None,
        "ranks": list(episode.ranks),
        "origin": first.origin,
        "facts": list(episode.facts),
    }
