"""Episodes are stored as they are: NaN and infinities included; lists are paged, latest first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest

from gradiometer.wire import RunInfo
from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.alerts import Breach, Episode, EpisodeState, Severity
from gradiometer_server.errors import InvalidRequest, NotFound
from gradiometer_server.store import alerts, runs
from gradiometer_server.store.database import Database, open_database


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = open_database(database_url, clock=SystemClock())
    with opened.write() as conn:
        for name in ("r0", "r1"):
            runs.ensure_run(conn, RunInfo(run_id=name, project="p", name="n", created_s=1.0), 1.0)
    yield opened
    opened.close()


def keys(database: Database) -> list[int]:
    with database.read() as conn:
        return [runs.get_run(conn, name, 1.0).run_key for name in ("r0", "r1")]


def episode(number: int, **changed: object) -> Episode:
    breach = Breach(
        rule="non_finite", severity=Severity.CRITICAL, step=number, time_s=1.5, metric="train/loss", value=math.inf,
        baseline=-math.inf, threshold=0.1, layers=("h.0.weight", "é"), num_layers=2, ranks=(0, 3), origin="forward",
        facts=("loss is Inf",),
    )  # fmt: skip
    one = Episode(
        alert_id=f"a{number}_x", attempt=1, state=EpisodeState.FIRING, first=breach, worst=breach,
        opened_s=float(number // 2), last_step=number, count=1, severity=Severity.CRITICAL, layers=breach.layers,
        num_layers=2, ranks=(0, 3), facts=breach.facts,
    )  # fmt: skip
    return dataclasses.replace(one, **changed)  # type: ignore[arg-type]


def test_an_episode_comes_back_equal_and_is_replaced_by_its_id(database: Database) -> None:
    key, other = keys(database)
    with database.write() as conn:
        alerts.upsert_episode(conn, key, episode(1))
        assert alerts.get_episode(conn, key, "a1_x") == episode(1)
        resolved = episode(
            1, state=EpisodeState.RESOLVED, resolved_step=9, resolved_s=2.0, last_step=8, count=5
        )
        assert [one.alert_id for one in alerts.open_episodes(conn, key)] == ["a1_x"]
        alerts.upsert_episode(conn, key, resolved)
        assert alerts.get_episode(conn, key, "a1_x") == resolved
        assert alerts.open_episodes(conn, key) == []
        with pytest.raises(NotFound, match="a1_x"):
            alerts.get_episode(conn, other, "a1_x")
        assert runs.get_run(conn, "r0", 1.0).alerts == {"firing": 0, "total": 1}


def test_nan_values_and_numpy_floats_are_kept(database: Database) -> None:
    key, _ = keys(database)
    worst = dataclasses.replace(episode(1).first, value=np.float64(np.nan), threshold=np.float64(2.5))
    with database.write() as conn:
        alerts.upsert_episode(conn, key, episode(1, worst=worst))
        back = alerts.get_episode(conn, key, "a1_x").worst
    assert back.value is not None
    assert math.isnan(back.value)
    assert back.threshold == 2.5


def test_pages_latest_first_of_one_run_or_all(database: Database) -> None:
    key, other = keys(database)
    with database.write() as conn:
        for number in range(9):
            alerts.upsert_episode(conn, key if number % 3 else other, episode(number))
    with database.read() as conn:
        seen: list[tuple[str, str, float]] = []
        cursor: str | None = None
        while True:
            page = alerts.list_episodes(conn, None, None, 2, cursor)
            seen += [(row.run_id, row.episode.alert_id, row.episode.opened_s) for row in page.episodes]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert len({alert_id for _, alert_id, _ in seen}) == len(seen) == 9
        assert [opened for *_, opened in seen] == sorted((opened for *_, opened in seen), reverse=True)
        assert {run_id for run_id, *_ in seen} == {"r0", "r1"}
        assert len(alerts.list_episodes(conn, other).episodes) == 3
        assert len(alerts.list_episodes(conn, None, "firing").episodes) == 9
        assert alerts.list_episodes(conn, None, EpisodeState.RESOLVED).episodes == ()
        for arguments in ({"state": "burning"}, {"limit": 0}, {"cursor": "x"}):
            with pytest.raises(InvalidRequest):
                alerts.list_episodes(conn, None, **arguments)  # type: ignore[arg-type]


def test_rule_states_are_any_json_and_none_removes_one(database: Database) -> None:
    key, other = keys(database)
    with database.write() as conn:
        alerts.save_rule_states(conn, key, {("a", ""): {"m": -math.inf, "n": [1, None]}, ("a", "k"): "text"})
        alerts.save_rule_states(conn, key, {("a", "k"): None, ("b", ""): 1.5})
        assert alerts.load_rule_states(conn, key) == {
            ("a", ""): {"m": -math.inf, "n": [1, None]},
            ("b", ""): 1.5,
        }
        assert alerts.load_rule_states(conn, other) == {}
