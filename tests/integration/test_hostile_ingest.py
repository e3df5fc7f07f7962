"""Well-formed messages with absurd contents: none may stop a run, freeze the server, or swell every later answer."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

from gradiometer import wire
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, frame, scalar_schema

MOST_S = 5.0
"""Far above what a refusal takes, far below what the quadratic check of names took (minutes)."""


def event(kind: str, **attributes: object) -> bytes:
    return wire.encode(wire.Event(kind=kind, time=1.8e9, attributes=attributes))  # type: ignore[arg-type]


def steps(server: Server, run: str) -> list[int]:
    answer = server.post("/series/query", {"series": [{"run": run, "metric": "loss"}]})
    found: list[int] = answer["series"][0]["points"]["step"]
    return found


@pytest.mark.parametrize("reports", [2**53, 2**63, 2**64 - 1])
def test_an_absurd_count_of_dropped_reports_does_not_stop_the_run(
    server: Callable[..., Server], database_url: str, reports: int
) -> None:
    one = server(database_url)
    with WireClient(one.url, "r") as client:
        client.hello()
        ack = client.send(scalar_schema("loss"), event("dropped", reports=reports), frame({1: [1.0]}))
        assert [rejection.code for rejection in ack.rejected] == ["invalid_event"]
        assert str(reports) in ack.rejected[0].message
        most = event("dropped", reports=2**53 - 1)
        # Each alone can be kept, their sum cannot.
        assert client.send(*[most] * 1100, frame({2: [1.0]}), timeout_s=60).rejected == ()
    eventually(lambda: steps(one, "r") == [1, 2], what="both steps are folded")
    # Points are shown before what may wait for the disk.
    eventually(lambda: one.get("/runs/r")["dropped_reports"] == 2**53 - 1, 30, what="the count is kept")
    assert "Traceback" not in one.log


@pytest.mark.parametrize("reports", [-1, 2**53, 2**64 - 1])
def test_an_absurd_status_is_counted_and_the_connection_goes_on(
    server: Callable[..., Server], reports: int
) -> None:
    one = server()
    with WireClient(one.url, "r") as client:
        client.hello()
        health = wire.SourceStatus(
            rank=0, attempt=client.source.attempt, alive=True, spooled_seq=0, dropped_reports=reports
        )
        client.send_raw(wire.encode(wire.Status(sources=(health,))))
        assert client.send(scalar_schema("loss"), frame({1: [1.0]})).seq == 2
    assert one.get("/runs/r")["rejected_records"] == 1
    assert "Traceback" not in one.log


def test_a_schema_of_very_many_names_of_which_two_are_equal_is_refused_at_once(
    server: Callable[..., Server],
) -> None:
    one = server()
    names = [f"metric-{number}" for number in range(wire.MAX_COLUMNS - 1)]
    with WireClient(one.url, "r") as client:
        client.hello()
        began_s = time.monotonic()
        ack = client.send(scalar_schema(*names, names[-1]), timeout_s=60)
        assert time.monotonic() - began_s < MOST_S
        assert ack.rejected[0].code == "duplicate_name"
        assert repr(names[-1]) in ack.rejected[0].message


def test_a_layer_of_very_many_dimensions_is_refused_at_once(server: Callable[..., Server]) -> None:
    one = server()
    layers = (wire.Layer("w", (2**62,) * 300_000, 1),)
    with WireClient(one.url, "r") as client:
        client.hello()
        began_s = time.monotonic()
        ack = client.send(wire.encode(wire.LayerSchema(schema_id=1, layers=layers)), timeout_s=60)
        assert time.monotonic() - began_s < MOST_S
        assert ack.rejected[0].code == "invalid_layer"
        assert len(ack.rejected[0].message) < 1000


def test_megabytes_of_reason_do_not_come_back_with_every_read(server: Callable[..., Server]) -> None:
    one = server()
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(event("unavailable", metric="m" * 100_000, reason="r" * 1_000_000))
        client.send(event("exit", code=1, signal="S" * 1_000_000, reason="r" * 4_000_000))
    eventually(lambda: one.get("/runs/r")["state"] == "crashed", what="the run has ended")
    answer = httpx.get(f"{one.url}/api/v1/runs/r")
    assert len(answer.content) < 100_000
    assert answer.json()["exit"]["reason"].startswith("rrr")


def test_text_that_no_column_holds_is_no_error_of_the_server(
    server: Callable[..., Server], database_url: str
) -> None:
    one = server(database_url)
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(scalar_schema("loss"), frame({1: [1.0]}))
    for path in (
        "/runs?search=%00",
        "/runs?project=a%00b",
        "/runs/r/alerts/a%00b",
        "/runs/%00/metrics",
        "/alerts?run=%00",
    ):
        answer = httpx.get(f"{one.url}/api/v1{path}")
        assert answer.status_code < 500, (path, answer.text)
    # NUL also behind the name of a metric that there is: one engine would stop reading there.
    for name in ("a\0b", "loss\0"):
        asked = {"series": [{"run": "r", "metric": name}, {"run": "r", "metric": "loss"}]}
        found = one.post("/series/query", asked)["series"]
        assert found[0]["error"]
        assert found[1]["points"]["step"] == [1]
    assert "Traceback" not in one.log


def test_thousands_of_metrics_are_not_flushed_every_few_steps(server: Callable[..., Server]) -> None:
    one = server()
    names = ["loss", *(f"wide/{number}" for number in range(2999))]
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(scalar_schema(*names), timeout_s=30)
        for step in range(1, 61):
            client.send(frame({step: [float(step)] * len(names)}), timeout_s=30)
        eventually(lambda: steps(one, "r") == list(range(1, 61)), 30, what="all steps are shown")
        assert one.get("/runs/r")["sources"][0]["folded_seq"] == 0, (
            "60 steps of a series are too few for a chunk"
        )
