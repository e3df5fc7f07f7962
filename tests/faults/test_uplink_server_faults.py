"""The uplink against a server that dies, forgets to answer, asks again, refuses and comes back: nothing lost or double."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradiometer import spool, uplink, wire
from gradiometer.uplink.state import UplinkState, read_state
from tests.faults.ingest_double import IngestDouble, IngestModel, PostDouble, wait_until
from tests.support.eventually import eventually

EXIT = wire.encode(
    wire.Event(kind="exit", time=0.0, attributes={"code": 0, "signal": None, "inferred": False, "reason": ""})
)


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIOMETER_LINGER_S", "0.5")


@pytest.fixture
def double() -> Iterator[IngestDouble]:
    double = IngestDouble().start()
    yield double
    double.stop()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[spool.SpoolWriter]:
    writer = open_rank(tmp_path)
    yield writer
    finish(writer)


def open_rank(root: Path, rank: int = 0) -> spool.SpoolWriter:
    run = wire.RunInfo(run_id="run-1", project="tests", name="run-1", created_s=1.0)
    return spool.open_source(root, run, wire.SourceInfo(rank=rank, attempt=7, world_size=2))


def finish(*writers: spool.SpoolWriter) -> None:
    """Close the sources, so that their uplink ends."""
    for writer in writers:
        if writer.directory.exists():
            writer.append(EXIT)
        uplink.wake(writer.attempt_directory)
        writer.close()


def numbered(first: int, count: int) -> list[bytes]:
    return [b"record %d" % number for number in range(first, first + count)]


def say(writer: spool.SpoolWriter, records: list[bytes]) -> None:
    for record in records:
        writer.append(record)
        uplink.wake(writer.attempt_directory)


def state_of(writer: spool.SpoolWriter) -> UplinkState:
    state = read_state(writer.attempt_directory)
    assert state is not None
    return state


def test_records_arrive_in_order_and_the_folder_goes_away_when_all_is_delivered(
    writer: spool.SpoolWriter, double: IngestDouble, tmp_path: Path
) -> None:
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    say(writer, numbered(1, 50))
    assert uplink.wait_delivered(writer.attempt_directory, 0, 50, 10.0)
    assert double.model.records() == numbered(1, 50)
    say(writer, [EXIT])
    assert uplink.wait_delivered(writer.attempt_directory, 0, 51, 10.0)
    eventually(lambda: not list(tmp_path.iterdir()), what="the spool is empty")
    assert double.model.records() == [*numbered(1, 50), EXIT]
    assert double.model.num_repeats == 0
    assert double.headers[0]["path"] == "/api/v1/ingest"


def test_a_woken_uplink_sends_within_milliseconds(writer: spool.SpoolWriter, double: IngestDouble) -> None:
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    say(writer, [b"first"])
    assert uplink.wait_delivered(writer.attempt_directory, 0, 1, 10.0)
    waits_s = []
    for number in range(2, 42):
        started_s = time.monotonic()
        say(writer, [b"x"])
        while len(double.model.records()) < number:
            assert time.monotonic() - started_s < 5.0
        waits_s.append(time.monotonic() - started_s)
    # Polling would need 250 ms; the median leaves room for a busy machine.
    assert sorted(waits_s)[20] < 0.05


def test_a_server_that_dies_and_returns_gets_everything_once(
    writer: spool.SpoolWriter, double: IngestDouble
) -> None:
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    for round_number in range(3):
        say(writer, numbered(1 + 100 * round_number, 50))
        double.stop()
        say(writer, numbered(51 + 100 * round_number, 50))
        double.start()
    assert uplink.wait_delivered(writer.attempt_directory, 0, 300, 20.0)
    assert double.model.records() == numbered(1, 300)


def test_a_connection_cut_between_commit_and_ack_doubles_nothing(
    writer: spool.SpoolWriter, double: IngestDouble
) -> None:
    double.behaviour.die_before_ack = 3
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    say(writer, numbered(1, 40))
    assert uplink.wait_delivered(writer.attempt_directory, 0, 40, 20.0)
    assert double.model.records() == numbered(1, 40)
    assert double.num_connections >= 2


def test_a_gap_that_the_server_reports_is_filled(writer: spool.SpoolWriter, double: IngestDouble) -> None:
    double.model.gaps = 2
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    say(writer, numbered(1, 30))
    assert uplink.wait_delivered(writer.attempt_directory, 0, 30, 10.0)
    assert double.model.records() == numbered(1, 30)
    assert double.num_connections == 1


def test_a_busy_server_is_asked_again_later(writer: spool.SpoolWriter, double: IngestDouble) -> None:
    double.behaviour.busy = 1
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    say(writer, numbered(1, 10))
    assert uplink.wait_delivered(writer.attempt_directory, 0, 10, 10.0)
    assert double.model.records() == numbered(1, 10)


def test_nothing_is_sent_past_the_window(tmp_path: Path) -> None:
    double = IngestDouble(IngestModel(window_bytes=4000)).start()
    writer = open_rank(tmp_path)
    try:
        double.behaviour.mute = True
        for number in range(100):
            writer.append(b"%03d" % number * 50)
        uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
        eventually(lambda: double.model.statuses and double.model.records(), what="the window is used")
        beats = len(double.model.statuses)
        eventually(lambda: len(double.model.statuses) > beats + 1, what="two more heartbeats")
        sent_bytes = sum(map(len, double.model.records()))
        assert 3000 <= sent_bytes <= 4000
        double.behaviour.mute = False
        double.cut()
        assert uplink.wait_delivered(writer.attempt_directory, 0, 100, 10.0)
        assert [record[:3] for record in double.model.records()] == [
            b"%03d" % number for number in range(100)
        ]
    finally:
        finish(writer)
        eventually(lambda: not writer.directory.exists(), what="the uplink ends")
        double.stop()


def test_a_record_larger_than_the_window_goes_alone(tmp_path: Path) -> None:
    double = IngestDouble(IngestModel(window_bytes=1000)).start()
    writer = open_rank(tmp_path)
    try:
        records = [b"a", b"B" * 3_000_000, b"c"]
        uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
        say(writer, records)
        assert uplink.wait_delivered(writer.attempt_directory, 0, 3, 10.0)
        assert double.model.records() == records
    finally:
        finish(writer)
        eventually(lambda: not writer.directory.exists(), what="the uplink ends")
        double.stop()


def test_refused_records_are_counted_and_logged_and_hold_nothing_up(
    writer: spool.SpoolWriter, double: IngestDouble
) -> None:
    double.model.refuse = {b"record 2": "wrong_length"}
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    say(writer, numbered(1, 3))
    assert uplink.wait_delivered(writer.attempt_directory, 0, 3, 10.0)
    eventually(lambda: state_of(writer).rejected == {0: 1}, what="the refusal is counted")
    log = (writer.attempt_directory / "uplink.log").read_text()
    assert "record 2 was refused: refused by the test (wrong_length)" in log


def test_a_fatal_answer_keeps_the_spool_and_says_why(tmp_path: Path, double: IngestDouble) -> None:
    writer = open_rank(tmp_path)
    double.behaviour.fatal = wire.Problem(
        code="unknown_protocol", message="protocol 1 is too old", remedy="Update gradiometer.", fatal=True
    )
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    say(writer, numbered(1, 3))
    eventually(lambda: state_of(writer).state == "stopped", what="the uplink stops")
    started_s = time.monotonic()
    assert not uplink.wait_delivered(writer.attempt_directory, 0, 3, 30.0)
    assert time.monotonic() - started_s < 10.0
    assert "protocol 1 is too old (unknown_protocol). Update gradiometer." in state_of(writer).last_error
    assert double.num_connections == 1
    finish(writer)
    eventually(lambda: not uplink.wake(writer.attempt_directory), what="the uplink ends with the trainer")
    assert (writer.directory / "00000001.seg").exists()


def test_the_token_is_sent_and_a_wrong_one_is_named_in_the_state(
    writer: spool.SpoolWriter, double: IngestDouble
) -> None:
    double.behaviour.token = "right"
    uplink.ensure_running(writer.attempt_directory, url=double.url, token="wrong")
    say(writer, numbered(1, 3))
    eventually(lambda: "GRADIOMETER_TOKEN" in state_of(writer).last_error, what="the refusal is explained")
    assert double.headers[0]["authorization"] == "Bearer wrong"
    assert state_of(writer).transport == "websocket"
    double.behaviour.token = "wrong"
    assert uplink.wait_delivered(writer.attempt_directory, 0, 3, 20.0)


def test_where_websockets_are_refused_records_go_by_post(tmp_path: Path) -> None:
    model = IngestModel(window_bytes=2000)
    double, writer = PostDouble(model), open_rank(tmp_path)
    try:
        model.gaps = 1
        uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
        say(writer, numbered(1, 200))
        assert uplink.wait_delivered(writer.attempt_directory, 0, 200, 20.0)
        assert double.num_gets == 3
        say(writer, numbered(201, 1))
        assert uplink.wait_delivered(writer.attempt_directory, 0, 201, 10.0)
        eventually(lambda: state_of(writer).transport == "post", what="the state names the transport")
        say(writer, [EXIT])
        eventually(lambda: not writer.attempt_directory.exists(), what="the spool is delivered and removed")
        assert model.records() == [*numbered(1, 201), EXIT]
        assert model.statuses
    finally:
        finish(writer)
        double.stop()


def test_a_server_that_is_down_is_not_hammered_however_often_it_is_woken(
    writer: spool.SpoolWriter, double: IngestDouble
) -> None:
    double.behaviour.refuse_upgrade = 503
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    until_s = time.monotonic() + 2.0
    for number in itertools.count():
        if time.monotonic() > until_s:
            break
        say(writer, [b"%d" % number])
        time.sleep(0.002)
    # 0 s, 0.2 s, then at least 0.2 s, 0.4 s, 0.8 s, ...: six at most in two seconds.
    assert 2 <= double.num_upgrades <= 6
    double.behaviour.refuse_upgrade = None
    assert uplink.wait_delivered(writer.attempt_directory, 0, writer.seq, 20.0)
    assert "busy or starting" not in state_of(writer).last_error or wait_until(
        lambda: state_of(writer).state == "connected"
    )


def test_a_database_that_forgot_acknowledged_records_is_reported_and_nothing_is_skipped(
    writer: spool.SpoolWriter, double: IngestDouble
) -> None:
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    large = [bytes([number]) * 1_000_000 for number in range(12)]
    say(writer, large)
    assert uplink.wait_delivered(writer.attempt_directory, 0, 12, 20.0)
    eventually(
        lambda: not (writer.directory / "00000001.seg").exists(), what="what is acknowledged is deleted"
    )
    backup = dict(double.model.stored)
    double.model.stored.clear()
    double.cut()
    say(writer, [b"later"])
    eventually(lambda: "restore its database" in state_of(writer).last_error, what="the loss is explained")
    assert not double.model.records()
    double.model.stored.update(backup)
    double.cut()
    assert uplink.wait_delivered(writer.attempt_directory, 0, 13, 20.0)
    assert double.model.records() == [*large, b"later"]


def test_a_damaged_record_is_replaced_by_an_event_that_says_so(
    writer: spool.SpoolWriter, double: IngestDouble
) -> None:
    for record in numbered(1, 5):
        writer.append(record)
    segment = writer.directory / "00000001.seg"
    segment.write_bytes(segment.read_bytes().replace(b"record 3", b"rec0rd 3"))
    uplink.ensure_running(writer.attempt_directory, url=double.url, token=None)
    assert uplink.wait_delivered(writer.attempt_directory, 0, 5, 10.0)
    arrived = double.model.records()
    assert arrived[:2] + arrived[3:] == [b"record 1", b"record 2", b"record 4", b"record 5"]
    event = wire.decode_record(arrived[2])
    assert isinstance(event, wire.Event)
    assert event.kind == "dropped"
    assert "record 3" in event.attributes["reason"]
