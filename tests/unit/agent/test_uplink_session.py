"""The uplink's protocol machine: tables of events, and reconnects at any moment against a model of the server."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradiometer import wire
from gradiometer.uplink.session import (
    MAX_BATCH_BYTES,
    Acknowledged,
    Effect,
    Refused,
    Request,
    RetryLater,
    Rewound,
    Session,
    Stopped,
)
from tests.faults.ingest_double import IngestModel

ATTEMPT = 42
RUN = wire.RunInfo(run_id="run", project="tests", name="run", created_s=0.0)


def source(rank: int) -> wire.SourceInfo:
    return wire.SourceInfo(rank=rank, attempt=ATTEMPT, world_size=8)


def welcome(*acked: int, protocol: int = 1, window_bytes: int = 4 * 1024 * 1024) -> wire.Welcome:
    """Acknowledges `acked[k]` for rank k."""
    acks = tuple(wire.SourceAck(rank=rank, attempt=ATTEMPT, seq=seq) for rank, seq in enumerate(acked))
    return wire.Welcome(
        protocol=protocol, server_version="model", acked=acks, window_bytes=window_bytes, heartbeat_s=3.0
    )


def ack(
    seq: int, *, rank: int = 0, attempt: int = ATTEMPT, rejected: tuple[wire.Rejection, ...] = ()
) -> wire.Ack:
    return wire.Ack(rank=rank, attempt=attempt, seq=seq, rejected=rejected)


def gap(expected_seq: int) -> wire.Problem:
    return wire.Problem(
        code="sequence_gap", message="hole", rank=0, attempt=ATTEMPT, expected_seq=expected_seq
    )


def connected(*acked: int, window_bytes: int = 4 * 1024 * 1024) -> Session:
    """A session with one source per entry, welcomed."""
    session = Session(run=RUN, agent_version="1")
    for rank in range(len(acked)):
        session.add_source(source(rank))
    session.connect()
    session.receive(welcome(*acked, window_bytes=window_bytes))
    return session


def first_seq(session: Session, rank: int = 0) -> int | None:
    request = session.request(rank)
    return request.first_seq if request else None


def test_nothing_is_sent_before_the_welcome() -> None:
    session = Session(run=RUN, agent_version="1.2")
    session.add_source(source(1))
    session.add_source(source(0))
    assert session.request(0) is None
    hello = session.connect()
    known = {"run": RUN, "sources": (source(0), source(1)), "commands": ("ring", "dump", "histogram")}
    assert hello == wire.Hello(protocol=1, agent_version="1.2", **known)
    assert session.request(0) is None
    assert set(session.receive(welcome(7))) == {Acknowledged(rank=0, seq=7), Acknowledged(rank=1, seq=0)}
    assert session.request(0) == Request(rank=0, first_seq=8, max_bytes=MAX_BATCH_BYTES)
    assert first_seq(session, 1) == 1
    assert session.heartbeat_s == 3.0


EVENTS: list[tuple[str, wire.ServerMessage, tuple[Effect, ...], int]] = [
    ("an ack of everything", ack(3), (Acknowledged(rank=0, seq=3),), 4),
    ("an ack of a part", ack(1), (Acknowledged(rank=0, seq=1),), 4),
    ("an old ack", ack(0), (Acknowledged(rank=0, seq=0),), 4),
    ("an ack beyond what was sent here", ack(9), (Acknowledged(rank=0, seq=9),), 10),
    ("an ack of another attempt", ack(3, attempt=1), (), 4),
    ("an ack of another node's rank", ack(3, rank=5), (), 4),
    ("a gap", gap(2), (Rewound(rank=0, seq=2, message="hole"),), 2),
    (
        "a problem without a place",
        wire.Problem(code="store_unavailable", message="disk full"),
        (RetryLater(problem=wire.Problem(code="store_unavailable", message="disk full")),),
        4,
    ),
    (
        "a problem with a place of somebody else",
        wire.Problem(code="x", message="y", rank=4, attempt=ATTEMPT, expected_seq=1),
        (RetryLater(problem=wire.Problem(code="x", message="y", rank=4, attempt=ATTEMPT, expected_seq=1)),),
        4,
    ),
    (
        "a fatal problem",
        wire.Problem(code="x", message="y", fatal=True),
        (Stopped(problem=wire.Problem(code="x", message="y", fatal=True)),),
        4,
    ),
    ("a second welcome", welcome(2), (Acknowledged(rank=0, seq=2),), 4),
    (
        "the answer to a POST",
        wire.BatchResult(welcome=welcome(0), acks=(ack(3),)),
        (Acknowledged(rank=0, seq=0), Acknowledged(rank=0, seq=3)),
        4,
    ),
]


@pytest.mark.parametrize(
    ("message", "effects", "goes_on_at"), [row[1:] for row in EVENTS], ids=[row[0] for row in EVENTS]
)
def test_what_a_message_means_with_three_records_in_flight(
    message: wire.ServerMessage, effects: tuple[Effect, ...], goes_on_at: int
) -> None:
    session = connected(0)
    session.sent(0, 1, [b"1", b"2", b"3"])
    assert session.receive(message) == effects
    assert first_seq(session) == goes_on_at


def test_refused_records_are_told_before_they_are_acknowledged() -> None:
    session = connected(0)
    session.sent(0, 1, [b"1", b"2"])
    rejection = wire.Rejection(seq=2, code="bad", message="no")
    assert session.receive(ack(2, rejected=(rejection,))) == (
        Refused(rank=0, rejections=(rejection,)),
        Acknowledged(rank=0, seq=2),
    )


def test_another_protocol_stops_with_a_remedy() -> None:
    session = connected(0)
    (effect,) = session.receive(welcome(0, protocol=2))
    assert isinstance(effect, Stopped)
    assert "protocol 2" in effect.problem.message
    assert "same version" in effect.problem.remedy


def test_the_window_is_shared_by_all_sources_and_opened_by_acks() -> None:
    session = connected(0, 0, window_bytes=1000)
    assert session.request(0) == Request(rank=0, first_seq=1, max_bytes=250)
    session.sent(0, 1, [b"x" * 500])
    session.sent(1, 1, [b"x" * 400])
    assert session.in_flight_bytes == 900
    assert session.request(0) is None
    assert session.request(1) is None
    session.receive(ack(1))
    assert session.in_flight_bytes == 400
    assert first_seq(session, 1) == 2
    assert session.may_send(600)
    assert not session.may_send(601)
    session.receive(ack(1, rank=1))
    assert session.may_send(10_000), "a record larger than the window goes alone"


def test_a_part_acknowledged_message_stays_in_flight() -> None:
    session = connected(0)
    session.sent(0, 1, [b"x" * 10, b"x" * 10])
    session.receive(ack(1))
    assert session.in_flight_bytes == 20
    session.receive(ack(2))
    assert session.in_flight_bytes == 0


def test_a_gap_takes_back_only_what_follows_it() -> None:
    session = connected(0)
    session.sent(0, 1, [b"x" * 10])
    session.sent(0, 2, [b"y" * 7])
    session.receive(gap(2))
    assert session.in_flight_bytes == 10
    assert session.acked(0) == 0, "expected is not durable"


def test_a_reconnect_starts_again_where_the_server_says() -> None:
    session = connected(0)
    session.sent(0, 1, [b"1", b"2", b"3"])
    session.receive(ack(2))
    session.disconnect()
    assert session.request(0) is None
    assert session.in_flight_bytes == 0
    assert not session.welcomed
    session.connect()
    session.receive(welcome(1))
    assert first_seq(session) == 2, "the server's word wins, even when it has lost something"


def test_a_new_rank_is_announced_and_disturbs_nobody() -> None:
    session = connected(0)
    session.sent(0, 1, [b"1"])
    assert session.hello() is None
    session.add_source(source(1))
    hello = session.hello()
    assert hello is not None
    assert [info.rank for info in hello.sources] == [0, 1]
    assert session.hello() is None
    assert session.request(1) is None
    session.receive(welcome(0, 6))
    assert first_seq(session, 0) == 2
    assert first_seq(session, 1) == 7


def test_a_rank_announced_before_the_first_welcome_waits_for_its_own() -> None:
    session = Session(run=RUN, agent_version="1")
    session.add_source(source(0))
    session.connect()
    session.add_source(source(1))
    assert session.hello() is not None
    session.receive(welcome(0))
    assert session.request(1) is None, "that welcome answers the hello without it"
    session.receive(welcome(0, 6))
    assert first_seq(session, 1) == 7


def test_a_post_keeps_the_last_welcome_and_takes_back_what_was_not_acknowledged() -> None:
    session = connected(3)
    session.sent(0, 4, [b"4"])
    session.connect(keep_welcome=True)
    assert first_seq(session) == 4
    session.sent(0, 4, [b"4", b"5"])
    session.receive(welcome(5))
    assert session.acked(0) == 5
    assert first_seq(session) == 6


def test_a_removed_source_is_forgotten() -> None:
    session = connected(0, 0)
    session.remove_source(0)
    assert session.request(0) is None
    assert session.receive(ack(4)) == ()
    assert [info.rank for info in session.connect().sources] == [1]


class Line:
    """A session and a model server, joined by a line that is cut, delayed and refused at random.

    Faults stop after `NUM_FAULTY` events, so that the end must come.
    """

    NUM_FAULTY = 2000

    def __init__(self, seed: int, num_records: list[int], window_bytes: int) -> None:
        self.draw = random.Random(seed)
        self.spools = [
            [b"%d:%d" % (rank, seq) for seq in range(1, count + 1)] for rank, count in enumerate(num_records)
        ]
        self.model = IngestModel(window_bytes=window_bytes)
        self.session = Session(run=RUN, agent_version="1")
        self.up: deque[wire.Hello | wire.Records] = deque()
        self.down: deque[wire.ServerMessage] = deque()
        self.num_known = 0

    def deliver(self) -> None:
        """Play events until every record is acknowledged."""
        events = [self.add_rank, self.cut, self.gap, *[self.send, self.serve, self.hear] * 2]
        for number in range(200_000):
            if self.is_done():
                return
            event = self.draw.choice(events)
            if number < self.NUM_FAULTY or event not in (self.cut, self.gap):
                event()
            if number == self.NUM_FAULTY:
                self.reconnect()
        raise AssertionError("the session makes no progress")

    def is_done(self) -> bool:
        acked = [self.session.acked(rank) for rank in range(self.num_known)]
        return acked == [len(spool) for spool in self.spools]

    def add_rank(self) -> None:
        if self.num_known < len(self.spools):
            self.session.add_source(source(self.num_known))
            self.num_known += 1

    def cut(self) -> None:
        if self.draw.random() < 0.3:
            self.reconnect()

    def reconnect(self) -> None:
        self.up.clear()
        self.down.clear()
        self.session.disconnect()
        if self.num_known:
            self.up.append(self.session.connect())

    def gap(self) -> None:
        self.model.gaps = self.draw.randrange(2)

    def send(self) -> None:
        hello = self.session.hello()
        if hello is not None:
            self.up.append(hello)
        rank = self.draw.randrange(len(self.spools))
        request = self.session.request(rank)
        if request is None:
            return
        begin = request.first_seq - 1
        records = self.spools[rank][begin : begin + self.draw.randrange(1, 5)]
        if records and self.session.may_send(sum(map(len, records))):
            self.up.append(self.session.sent(rank, request.first_seq, records))
            assert self.session.in_flight_bytes <= max(self.model.window_bytes, sum(map(len, records)))

    def serve(self) -> None:
        if self.up:
            message = self.up.popleft()
            if isinstance(message, wire.Hello):
                self.down.append(self.model.welcome(message))
            else:
                self.down.append(self.model.take("run", message))

    def hear(self) -> None:
        if self.down:
            for effect in self.session.receive(self.down.popleft()):
                if isinstance(effect, Acknowledged):
                    assert effect.seq <= len(self.model.records(effect.rank)), "acknowledged means stored"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_records=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    window_bytes=st.sampled_from([1, 20, 200, 10_000]),
)
def test_reconnects_at_any_moment_lose_and_double_nothing(
    seed: int, num_records: list[int], window_bytes: int
) -> None:
    line = Line(seed, num_records, window_bytes)
    line.deliver()
    for rank, count in enumerate(num_records):
        assert line.model.records(rank) == [b"%d:%d" % (rank, seq) for seq in range(1, count + 1)]
