"""Scenario R46: an export holds every point, or says how many there are and how to get the rest."""

from __future__ import annotations

import csv
import io
import math
import struct

import httpx
import pytest

from tests.scenarios.asking import ask, ended
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, scalar_schema

NUM_POINTS = 14_000
ODD = {
    7: math.nan,
    70: math.inf,
    700: -math.inf,
    7000: -0.0,
    7001: 1e-320,
    7002: 5e-324,
    7003: 1e308,
    7004: 0.1,
}
WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def value(step: int) -> float:
    return ODD.get(step, math.sin(step))


@pytest.fixture
def whole(one: Server) -> Server:
    with WireClient(one.url, "long") as client:
        client.hello()
        client.send(scalar_schema("train/loss"))
        for first in range(0, NUM_POINTS, 2000):
            client.send(frame({step: [value(step)] for step in range(first, first + 2000)}))
        client.send(exit_event())
    ended(one, "long")
    return one


def bits(number: float) -> bytes:
    return b"NaN" if math.isnan(number) else struct.pack("<d", number)


def assert_whole(steps: list[int], values: list[float]) -> None:
    assert steps == list(range(NUM_POINTS))
    assert [bits(number) for number in values] == [bits(value(step)) for step in steps]


def test_R46_an_export_of_14_000_points_has_14_000_points(whole: Server) -> None:
    path = "/runs/long/points"
    # JSON comes in pages: each says how many there are in all, and the last one that it is the last.
    steps: list[int] = []
    values: list[float] = []
    cursor, num_pages = None, 0
    while num_pages == 0 or cursor is not None:
        params = {"metric": "train/loss", **({"cursor": cursor} if cursor else {})}
        page = ask(whole, "GET", path, params=params)
        assert page["total"] == NUM_POINTS
        steps += page["points"]["step"]
        values += [
            WORDS.get(item, item) if isinstance(item, str) else item for item in page["points"]["value"]
        ]
        cursor, num_pages = page["next_cursor"], num_pages + 1
    assert num_pages > 1
    assert_whole(steps, values)
    # CSV comes whole, unless somebody asks for less; then it is said where the rest is.
    answer = httpx.get(
        f"{whole.url}/api/v1{path}", params={"metric": "train/loss", "format": "csv"}, timeout=30
    )
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["x-total-count"] == str(NUM_POINTS)
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert_whole([int(row["step"]) for row in rows], [float(row["value"]) for row in rows])
    some = httpx.get(
        f"{whole.url}/api/v1{path}",
        params={"metric": "train/loss", "format": "csv", "limit": 1000},
        timeout=30,
    )
    assert len(some.text.splitlines()) == 1001
    assert some.headers["x-total-count"] == str(NUM_POINTS)
    assert some.headers["x-next-cursor"]
