"""The agents' door of a real server: WebSocket and POST, good input and every kind of bad."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable

import httpx
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from gradiometer import wire
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event

COLUMNS = wire.encode(wire.ScalarSchema(schema_id=1, columns=(wire.Column(name="train/loss"),)))


@pytest.fixture
def one(server: Callable[..., Server]) -> Server:
    return server()


def frame(step: int, *values: float, schema_id: int = 1) -> bytes:
    return wire.encode(
        wire.Frame(
            schema_id=schema_id,
            steps=(step,),
            times=(1.8e9,),
            values=struct.pack(f"<{len(values)}d", *values),
        )
    )


def points(server: Server, run: str, metric: str = "train/loss") -> dict[int, object]:
    answer = server.post("/series/query", {"series": [{"run": run, "metric": metric}], "buckets": 5000})
    found = answer["series"][0]["points"]
    return dict(zip(found["step"], found["mean"], strict=True))


def test_records_are_acknowledged_and_answered_by_rest_at_once_and_after_a_restart(one: Server) -> None:
    with WireClient(one.url, "r") as client:
        assert isinstance(client.hello(), wire.Welcome)
        assert client.send(COLUMNS, frame(1, 1.5), frame(2, 2.5)).seq == 3
        eventually(lambda: points(one, "r") == {1: 1.5, 2: 2.5}, what="both points")
    one.stop()
    one.start()
    assert points(one, "r") == {1: 1.5, 2: 2.5}
    with WireClient(one.url, "r") as client:
        welcome = client.hello()
        assert isinstance(welcome, wire.Welcome)
        assert welcome.acked[0].seq == 3, "the agent goes on where it was"
        assert client.send(frame(3, 3.5)).rejected == (), "the schema survived"
        eventually(lambda: points(one, "r") == {1: 1.5, 2: 2.5, 3: 3.5}, what="all points")


@pytest.mark.parametrize("what", [{"pid": 2}, {"host": "other"}, {"started_s": 1.8e9}])
def test_a_second_writer_of_a_source_is_refused_and_shown(one: Server, what: dict[str, object]) -> None:
    with WireClient(one.url, "r") as first, WireClient(one.url, "r") as second:
        first.hello()
        first.send(COLUMNS, frame(1, 1.5))
        second.source = msgspec.structs.replace(second.source, **what)
        problem = second.hello()
        assert isinstance(problem, wire.Problem)
        assert (problem.code, problem.fatal) == ("second_writer", True)
        for part in ("run 'r'", "attempt 1800000000000", "rank 0", "process 1 on test"):
            assert part in problem.message
        assert "RANK" in problem.remedy
        assert "GRADIOMETER_ATTEMPT" in problem.remedy
        assert first.send(frame(2, 2.5)).seq == 3, "the first goes on"
    eventually(lambda: one.get("/runs/r")["rejected_records"] == 1, what="the refusal on the run")
    with WireClient(one.url, "r") as again:
        assert isinstance(again.hello(), wire.Welcome), "the first writer, on a new connection"


def test_a_run_does_not_end_in_the_future(one: Server) -> None:
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(exit_event(0, time_s=time.time() + 1e6))
    run = eventually(lambda: (found := one.get("/runs/r"))["state"] == "finished" and found, what="the end")
    assert run["finished_s"] <= time.time()
    assert run["updated_s"] <= time.time()


def test_what_agents_get_wrong_is_counted_by_code(one: Server) -> None:
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(COLUMNS, frame(1, 1.5))
        client.post(COLUMNS, frame(1, 9.0), first_seq=1)
        assert client.receive().seq == 2
        client.post(frame(2, 2.5), first_seq=9)
        assert client.receive().expected_seq == 3
        assert client.send(frame(-1, 2.5)).rejected
    with WireClient(one.url, "r") as stranger:
        assert stranger.hello(protocol=99).code == "unknown_protocol"
    counts = httpx.get(one.url + "/readyz").json()["ingest"]
    assert counts["repeated_record"] == 2
    assert counts["sequence_gap"] == 1
    assert counts["unknown_protocol"] == 1
    assert sum(counts.values()) == 5, counts
    assert one.get("/runs/r")["rejected_records"] == 2, "the gap and the negative step"
    assert points(one, "r") == {1: 1.5}


def test_the_exception_that_ended_a_run_is_named(one: Server) -> None:
    attributes = {"type": "ValueError", "message": "boom", "traceback": "..."}
    exception = wire.encode(wire.Event(kind="exception", time=1.8e9, step=1, attributes=attributes))
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(COLUMNS, frame(1, 1.5), exception, exit_event(1))
        run = eventually(lambda: (r := one.get("/runs/r"))["state"] == "failed" and r, what="it has failed")
    assert run["exit"]["exception"] == "ValueError: boom"
    assert run["exit"]["code"] == 1
    assert one.get("/runs")["runs"][0]["exit"]["exception"] == "ValueError: boom"


def test_a_bad_record_is_refused_counted_and_loses_nothing(one: Server) -> None:
    with WireClient(one.url, "r") as client:
        client.hello()
        ack = client.send(COLUMNS, frame(1, 1.0), frame(2, 1.0, 2.0), b"\xc1", frame(-1, 1.0), frame(3, 3.0))
        assert [rejection.code for rejection in ack.rejected] == [
            "frame_length",
            "malformed_record",
            "step_out_of_range",
        ]
        assert ack.seq == 6
        eventually(lambda: points(one, "r") == {1: 1.0, 3: 3.0}, what="the good ones")
        assert one.get("/runs/r")["rejected_records"] == 3


def test_a_gap_is_answered_with_the_number_expected_and_the_connection_goes_on(one: Server) -> None:
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(COLUMNS)
        client.post(frame(9, 9.0), first_seq=7)
        problem = client.receive()
        assert isinstance(problem, wire.Problem)
        assert (problem.code, problem.fatal, problem.expected_seq) == ("sequence_gap", False, 2)
        client.post(COLUMNS, first_seq=1)
        assert client.receive() == wire.Ack(rank=0, attempt=client.source.attempt, seq=1), (
            "a repeat is harmless"
        )
        assert client.send(frame(1, 1.0)).seq == 2


def test_values_come_through_bit_for_bit(one: Server) -> None:
    values = [math.nan, math.inf, -math.inf, 5e-324, -0.0, 1e308]
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(COLUMNS, *(frame(step, value) for step, value in enumerate(values)))
        eventually(lambda: len(points(one, "r")) == len(values), what="all points")
    answer = one.post("/series/query", {"series": [{"run": "r", "metric": "train/loss"}]})
    found = answer["series"][0]["points"]
    assert (found["nan"][0], found["pos_inf"][1], found["neg_inf"][2]) == (1, 1, 1)
    assert [math.copysign(1, found["mean"][4]), found["mean"][3], found["mean"][5]] == [-1.0, 5e-324, 1e308]


def test_an_unknown_protocol_is_refused_for_good(one: Server) -> None:
    with WireClient(one.url, "r") as client:
        problem = client.hello(protocol=99)
        assert isinstance(problem, wire.Problem)
        assert (problem.code, problem.fatal) == ("unknown_protocol", True)
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1008, "unknown_protocol")


@pytest.mark.parametrize("data", [b"\xc1garbage", "text"])
def test_what_is_no_message_ends_the_connection_and_is_counted(one: Server, data: bytes | str) -> None:
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(COLUMNS, frame(1, 1.0))
        client.send_raw(data)
        problem = client.receive()
        assert isinstance(problem, wire.Problem)
        assert (problem.code, problem.fatal) == ("malformed_message", True)
    eventually(lambda: one.get("/runs/r")["rejected_records"] == 1, what="it is counted")
    assert points(one, "r") == {1: 1.0}


def test_an_oversized_message_is_refused_with_its_size_and_counted(one: Server) -> None:
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(COLUMNS, frame(1, 1.0))
        client.send_raw(b"x" * (wire.MAX_MESSAGE_BYTES + 1))
        problem = client.receive()
        assert isinstance(problem, wire.Problem)
        assert (problem.code, problem.fatal) == ("message_too_large", True)
        assert str(wire.MAX_MESSAGE_BYTES + 1) in problem.message
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
    eventually(lambda: one.get("/runs/r")["rejected_records"] == 1, what="it is counted")
    assert points(one, "r") == {1: 1.0}


def test_a_message_beyond_what_is_read_at_all_ends_the_connection_and_is_counted(one: Server) -> None:
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(COLUMNS, frame(1, 1.0))
        # The server drops the line while we still send, so its close frame may not reach us.
        with pytest.raises(ConnectionClosed):
            _send_and_read(client, b"x" * (2 * wire.MAX_MESSAGE_BYTES + 1))
    eventually(lambda: one.get("/runs/r")["rejected_records"] == 1, what="it is counted")
    assert points(one, "r") == {1: 1.0}


def _send_and_read(client: WireClient, data: bytes) -> None:
    client.send_raw(data)
    client.receive()


def test_a_client_of_another_subprotocol_is_refused_with_a_reason(one: Server) -> None:
    address = one.url.replace("http", "ws", 1) + "/api/v1/ingest"
    with pytest.raises(InvalidStatus) as refused, connect(address, proxy=None):
        pass
    assert refused.value.response.status_code == 400
    problem = wire.decode_server_message(bytes(refused.value.response.body or b""))
    assert isinstance(problem, wire.Problem)
    assert problem.code == "unknown_subprotocol"


def batch(run_id: str, *records: bytes, protocol: int = 1, first_seq: int = 1) -> bytes:
    run = wire.RunInfo(run_id=run_id, project="tests", name=run_id, created_s=1.8e9)
    source = wire.SourceInfo(rank=0, attempt=5)
    hello = wire.Hello(protocol=protocol, agent_version="test", run=run, sources=(source,))
    sent = (wire.Records(rank=0, attempt=5, first_seq=first_seq, records=records),) if records else ()
    return wire.encode(wire.Batch(hello=hello, records=sent))


def post(server: Server, body: bytes) -> tuple[int, wire.ServerMessage]:
    answer = httpx.post(f"{server.url}/api/v1/ingest", content=body, timeout=30)
    return answer.status_code, wire.decode_server_message(answer.content)


def test_a_post_does_what_the_socket_does(one: Server) -> None:
    status, result = post(one, batch("r", COLUMNS, frame(1, 1.0), frame(2, 1.0, 1.0)))
    assert status == 200
    assert isinstance(result, wire.BatchResult)
    assert result.acks[0].seq == 3
    assert result.acks[0].rejected[0].code == "frame_length"
    _, again = post(one, batch("r", frame(7, 1.0), first_seq=9))
    assert isinstance(again, wire.BatchResult)
    assert again.welcome.acked[0].seq == 3
    assert again.problems[0].expected_seq == 4
    eventually(lambda: points(one, "r") == {1: 1.0}, what="the point")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"\xc1", 400, "malformed_message"),
        (wire.encode(wire.Status(sources=())), 400, "batch_expected"),
        (batch("r", protocol=2), 400, "unknown_protocol"),
        (batch(""), 400, "invalid_hello"),
    ],
)
def test_a_bad_post_gets_a_problem(one: Server, body: bytes, status: int, code: str) -> None:
    answered, problem = post(one, body)
    assert answered == status
    assert isinstance(problem, wire.Problem)
    assert (problem.code, problem.fatal) == (code, True)


def test_a_heartbeat_keeps_a_run_running_and_drops_are_shown(one: Server) -> None:
    with WireClient(one.url, "r") as client:
        client.hello()
        attempt = client.source.attempt
        health = wire.SourceStatus(rank=0, attempt=attempt, alive=True, spooled_seq=0, dropped_reports=3)
        client.send_raw(wire.encode(wire.Status(sources=(health,))))
        eventually(lambda: one.get("/runs/r")["dropped_reports"] == 3, what="the drops")
        assert one.get("/runs/r")["state"] == "running"
        client.send(
            wire.encode(wire.Event(kind="exit", time=1.8e9, attributes={"code": None, "signal": "SIGKILL"}))
        )
        eventually(lambda: one.get("/runs/r")["state"] == "crashed", what="the end")
