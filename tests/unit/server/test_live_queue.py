"""What one browser is owed: merged points, order, the 50 ms pace, and the end of a queue nobody empties."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradiometer_server.domain.live import PointsUpdate
from gradiometer_server.live.queue import (
    MAX_PENDING_MESSAGES,
    MAX_PENDING_POINTS,
    POINTS_INTERVAL_S,
    BrowserQueue,
)


def points(run: str = "a", layers_step: int | None = None, **series: list[tuple[int, float]]) -> PointsUpdate:
    return PointsUpdate(run_id=run, series=series, layers_step=layers_step)


def test_the_first_points_go_at_once_and_later_ones_join_one_message() -> None:
    queue = BrowserQueue()
    queue.add_points(points(loss=[(1, 0.5)]))
    assert queue.wait_s(10.0) == 0.0
    assert queue.take(10.0) == [
        {
            "type": "points",
            "run": "a",
            "series": [{"metric": "loss", "steps": [1], "values": [0.5]}],
            "layers_step": None,
        }
    ]
    queue.add_points(points(loss=[(2, math.nan)], layers_step=2))
    queue.add_points(points(loss=[(3, math.inf)], lr=[(3, 0.1)], layers_step=3))
    assert queue.take(10.0 + POINTS_INTERVAL_S / 2) == []
    assert queue.wait_s(10.0 + POINTS_INTERVAL_S / 2) == pytest.approx(POINTS_INTERVAL_S / 2)
    (message,) = queue.take(10.0 + POINTS_INTERVAL_S)
    assert message["series"] == [
        {"metric": "loss", "steps": [2, 3], "values": ["NaN", "Infinity"]},
        {"metric": "lr", "steps": [3], "values": [0.1]},
    ]
    assert message["layers_step"] == 3
    assert queue.wait_s(11.0) is None


def test_runs_have_a_pace_of_their_own() -> None:
    queue = BrowserQueue()
    queue.add_points(points("a", loss=[(1, 1.0)]))
    queue.take(10.0)
    queue.add_points(points("a", loss=[(2, 1.0)]))
    queue.add_points(points("b", loss=[(1, 1.0)]))
    assert [message["run"] for message in queue.take(10.01)] == ["b"]


def test_other_messages_keep_their_order_and_the_newest_of_a_kind_takes_the_place_of_the_old() -> None:
    queue = BrowserQueue()
    queue.add(("alert", "a", "1"), {"n": 1})
    queue.add(("run", "a"), {"n": 2})
    queue.add(("alert", "a", "2"), {"n": 3})
    queue.add(("alert", "a", "1"), {"n": 4})
    assert queue.wait_s(0.0) == 0.0
    assert [message["n"] for message in queue.take(0.0)] == [4, 2, 3]
    assert queue.take(0.0) == []


def test_a_browser_that_takes_nothing_is_told_to_resync_and_owes_no_more_memory() -> None:
    queue = BrowserQueue()
    queue.add(("alert", "b", "1"), {"n": 1})
    for step in range(MAX_PENDING_POINTS + 1):
        queue.add_points(points("a", loss=[(step, 1.0)]))
    messages = queue.take(0.0)
    assert [(message["type"], message["run"]) for message in messages] == [("resync", "a"), ("resync", "b")]
    assert queue.num_resyncs == 1
    queue.add_points(points("a", loss=[(7, 1.0)]))
    assert [message["type"] for message in queue.take(1.0)] == ["points"]


def test_a_flood_of_alerts_ends_in_a_resync_too() -> None:
    queue = BrowserQueue()
    for number in range(MAX_PENDING_MESSAGES + 1):
        queue.add(("alert", "a", str(number)), {"n": number})
    assert [message["type"] for message in queue.take(0.0)] == ["resync"]


def test_what_is_no_longer_watched_is_forgotten() -> None:
    queue = BrowserQueue()
    queue.add_points(points("a", loss=[(1, 1.0)]))
    queue.add(("alert", "a", "1"), {})
    queue.add(("alert", "b", "1"), {"kept": True})
    queue.forget("a")
    assert queue.take(0.0) == [{"kept": True}]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from(["x", "y"]),
            st.lists(
                st.tuples(st.integers(0, 99), st.floats(allow_nan=False, allow_infinity=False)), max_size=4
            ),
            st.floats(0.0, 0.2),
        ),
        max_size=30,
    )
)
def test_every_point_is_sent_once_and_in_order(
    arrivals: list[tuple[str, str, list[tuple[int, float]], float]],
) -> None:
    queue, now_s = BrowserQueue(), 100.0
    sent: dict[tuple[str, str], list[tuple[int, float]]] = {}
    expected: dict[tuple[str, str], list[tuple[int, float]]] = {}
    last_s: dict[str, float] = {}

    def send(messages: list[Any]) -> None:
        for message in messages:
            assert now_s - last_s.get(message["run"], 0.0) >= POINTS_INTERVAL_S - 1e-9
            last_s[message["run"]] = now_s
            for series in message["series"]:
                rows = zip(series["steps"], series["values"], strict=True)
                sent.setdefault((message["run"], series["metric"]), []).extend(rows)

    for run, metric, rows, pause_s in arrivals:
        queue.add_points(points(run, **{metric: rows}))
        expected.setdefault((run, metric), []).extend(rows)
        send(queue.take(now_s))
        now_s += pause_s
    while (wait_s := queue.wait_s(now_s)) is not None:
        now_s += wait_s
        send(queue.take(now_s))
    assert sent == expected
