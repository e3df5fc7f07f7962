"""The values that stand for runs in a list: of metrics that were defined, newest points included."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Select, bindparam, select

from gradiometer_server.domain.series import Tail
from gradiometer_server.store.database import Database
from gradiometer_server.store.definitions import Definition, best_of, definition_for, definitions_of
from gradiometer_server.store.metric_rows import MetricRow, metric_of
from gradiometer_server.store.pieces import make_piece
from gradiometer_server.store.series import SeriesRow, series_row_from
from gradiometer_server.store.statements import Among, of_keys
from gradiometer_server.store.tables import series

MAX_LISTED: Final = 20
"""Most metrics of a run whose summary a list has without being asked for them."""


def _scalars(among: Among) -> Select[Any]:
    return select(series).where(among(series.c.run_id), series.c.rank.is_(None), series.c.kind == "scalar")


_NAMED = series.c.key.in_(bindparam("names", expanding=True))
_SCALARS = of_keys(_scalars)
_SCALARS_OF = of_keys(lambda among: _scalars(among).where(_NAMED))


def summary_values(
    database: Database,
    run_keys: Collection[int],
    tails: Callable[[int], Mapping[int, Tail]],
    names: Collection[str] | None = None,
    *,
    most: int | None = None,
) -> dict[int, dict[str, float]]:
    """By run, the summary of its defined metrics (of those in `names`), last, min, max or best; a mean is left out.

    Runs that define nothing cost one look at a table. Raises `StoreUnavailable`.

    Args:
        most: only of metrics that were defined by their own name, not by a pattern, and at most so many of each run,
            the first by name.
    """
    if not run_keys or (names is not None and not names):
        return {}
    with database.read() as conn:
        definitions = definitions_of(conn, run_keys)
    if most is not None:
        definitions = _listed(definitions, most)
    if not definitions:
        return {}
    fresh = {key: tails(key) for key in definitions}
    wanted = names if names is not None else _exact(definitions)
    statement = _SCALARS if wanted is None else _SCALARS_OF
    with database.read() as conn:
        found = conn.execute(
            statement.on(conn), {"keys": list(definitions), "names": list(wanted or ())}
        ).all()
    by_metric: dict[tuple[int, str], list[SeriesRow]] = {}
    for row in sorted(map(series_row_from, found), key=lambda row: row.series.attempt):
        by_metric.setdefault((row.series.run_key, row.series.key), []).append(row)
    return _values(by_metric, definitions, fresh)


def _listed(definitions: Mapping[int, Sequence[Definition]], most: int) -> dict[int, tuple[Definition, ...]]:
    kept = {
        key: tuple(one for one in some if "*" not in one.name and one.summary != "mean")[:most]
        for key, some in definitions.items()
    }
    return {key: some for key, some in kept.items() if some}


def _exact(definitions: Mapping[int, Sequence[Definition]]) -> Collection[str] | None:
    """The names that are defined; None where a pattern may mean any."""
    found = {one.name for some in definitions.values() for one in some}
    return None if any("*" in name for name in found) else found


def _values(
    by_metric: Mapping[tuple[int, str], Sequence[SeriesRow]],
    definitions: Mapping[int, Sequence[Definition]],
    fresh: Mapping[int, Mapping[int, Tail]],
) -> dict[int, dict[str, float]]:
    values: dict[int, dict[str, float]] = {}
    for (run_key, name), rows in by_metric.items():
        definition = None if name.startswith("_") else definition_for(definitions[run_key], name)
        if definition is None:
            continue
        pieces = [make_piece(row, fresh[run_key].get(row.series.series_id), None) for row in rows]
        value = summarised(metric_of(name, pieces), definition)
        if value is not None:
            values.setdefault(run_key, {})[name] = value
    return values


def summarised(row: MetricRow, definition: Definition) -> float | None:
    """The value that stands for a metric; None for a mean, which takes reading the points, and where there is none."""
    figures = {
        "last": row.last,
        "min": row.min,
        "max": row.max,
        "best": best_of(definition.goal, row.min, row.max),
    }
    return figures.get(definition.summary)
