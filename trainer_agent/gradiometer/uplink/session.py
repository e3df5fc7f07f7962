"""The uplink's half of the wire protocol as a plain machine: messages in, messages and effects out; no I/O, no clock.

The owner (`sidecar.py`) asks `request(rank)` what to read next, hands the records to `sent` and puts the message it
gets back on the wire; every message from the server goes to `receive`, which answers with effects. Per source:

    records 1 .. acked            durable on the server
    acked + 1 .. next_seq - 1     in flight, together with the other sources at most `window_bytes`
    next_seq ..                   still in the spool alone

A new connection forgets what was in flight and starts again after what the server's `Welcome` says, so a
reconnect at any moment loses nothing, and the server drops what it sees twice.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Final

from gradiometer import commands, wire

MAX_BATCH_BYTES: Final = 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to read from a source's spool next."""

    rank: int
    first_seq: int
    max_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """Everything of this source up to `seq` is durable on the server."""

    rank: int
    seq: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The server will never take these records; they are acknowledged and counted on the run."""

    rank: int
    rejections: tuple[wire.Rejection, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """The server asked for records again, from `seq` on."""

    rank: int
    seq: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryLater:
    """Give this connection up, wait, and resend from the last acknowledgement on a new one."""

    problem: wire.Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Sending again without a change would fail again: stop, keep the spool and say why."""

    problem: wire.Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Commanded:
    """The server asks the trainers for something; perhaps not for the first time."""

    command: wire.Command


Effect = Acknowledged | Refused | Rewound | RetryLater | Stopped | Commanded


@dataclasses.dataclass(slots=True, kw_only=True)
class _Source:
    info: wire.SourceInfo
    acked: int = 0
    next_seq: int = 1
    hello_number: int = 0
    """Which hello of this connection named it first; 0: none yet."""
    welcomed: bool = False
    in_flight: collections.deque[tuple[int, int]] = dataclasses.field(default_factory=collections.deque)
    """(last number, bytes) of every message that is not acknowledged, oldest first."""

    def acknowledge(self, seq: int) -> None:
        self.acked = max(self.acked, seq)
        self.next_seq = max(self.next_seq, self.acked + 1)
        while self.in_flight and self.in_flight[0][0] <= self.acked:
            self.in_flight.popleft()

    def rewind(self, next_seq: int) -> None:
        while self.in_flight and self.in_flight[-1][0] >= next_seq:
            self.in_flight.pop()
        self.next_seq = next_seq


class Session:
    """One uplink's conversation with one server, over any number of connections."""

    def __init__(self, *, run: wire.RunInfo, agent_version: str) -> None:
        self._run = run
        self._agent_version = agent_version
        self._sources: dict[int, _Source] = {}
        self._connected = False
        self._num_hellos = 0
        self._num_welcomes = 0
        self.window_bytes = wire.Welcome(protocol=0, server_version="", acked=()).window_bytes
        self.heartbeat_s = wire.Welcome(protocol=0, server_version="", acked=()).heartbeat_s

    def add_source(self, info: wire.SourceInfo) -> None:
        """Make a rank known; `hello` then has something new to say."""
        self._sources.setdefault(info.rank, _Source(info=info))

    def remove_source(self, rank: int) -> None:
        """Forget a rank whose records are all delivered."""
        self._sources.pop(rank, None)

    def acked(self, rank: int) -> int:
        """Last acknowledged record of a source."""
        return self._sources[rank].acked

    @property
    def in_flight_bytes(self) -> int:
        """Bytes sent and not yet acknowledged, over all sources."""
        return sum(num_bytes for source in self._sources.values() for _, num_bytes in source.in_flight)

    @property
    def welcomed(self) -> bool:
        """Whether the server has answered on this connection."""
        return any(source.welcomed for source in self._sources.values())

    def connect(self, *, keep_welcome: bool = False) -> wire.Hello:
        """Begin a connection and return its first message.

        `keep_welcome` is for POST, where every request is a connection of its own: what the last answer said about
        the sources still holds, and only what was in flight starts again.
        """
        self._connected = True
        self._num_hellos = self._num_welcomes = 0
        for source in self._sources.values():
            source.rewind(source.acked + 1)
            source.hello_number = 0
            source.welcomed = source.welcomed and keep_welcome
        hello = self.hello()
        assert hello is not None, "a connection without a source has nothing to say"
        return hello

    def disconnect(self) -> None:
        """The connection is gone, with all that was in flight."""
        self._connected = False
        for source in self._sources.values():
            source.rewind(source.acked + 1)
            source.hello_number, source.welcomed = 0, False

    def hello(self) -> wire.Hello | None:
        """The greeting to send if a source is new on this connection; it names all of them."""
        new = [source for source in self._sources.values() if not source.hello_number]
        if not self._connected or not new:
            return None
        self._num_hellos += 1
        for source in new:
            source.hello_number = self._num_hellos
        infos = tuple(source.info for _, source in sorted(self._sources.items()))
        return wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            agent_version=self._agent_version,
            run=self._run,
            sources=infos,
            commands=commands.KINDS,
        )

    def request(self, rank: int) -> Request | None:
        """What to read next from a source, or None while its resume point is unknown or the window is full."""
        source = self._sources.get(rank)
        if source is None or not self._connected or not source.welcomed:
            return None
        batch_bytes = min(MAX_BATCH_BYTES, max(1, self.window_bytes // 4))
        if not self.may_send(batch_bytes):
            return None
        return Request(rank=rank, first_seq=source.next_seq, max_bytes=batch_bytes)

    def may_send(self, num_bytes: int) -> bool:
        """Whether records of this size fit the window now; one that is larger than all of it must go alone."""
        in_flight_bytes = self.in_flight_bytes
        return in_flight_bytes == 0 or in_flight_bytes + num_bytes <= self.window_bytes

    def sent(self, rank: int, first_seq: int, records: Sequence[bytes]) -> wire.Records:
        """The message that carries these records, which are in flight from now on."""
        source = self._sources[rank]
        assert first_seq == source.next_seq, "records go out in order"
        source.next_seq += len(records)
        source.in_flight.append((source.next_seq - 1, sum(map(len, records))))
        return wire.Records(
            rank=rank, attempt=source.info.attempt, first_seq=first_seq, records=tuple(records)
        )

    def receive(self, message: wire.ServerMessage) -> tuple[Effect, ...]:
        """Take one message from the server; returns what follows from it, in order."""
        match message:
            case wire.Welcome():
                return self._welcome(message)
            case wire.Ack():
                return self._ack(message)
            case wire.Problem():
                return self._problem(message)
            case wire.Command():
                return (Commanded(command=message),)
            case wire.BatchResult():
                answers: tuple[wire.ServerMessage, ...] = (
                    message.welcome,
                    *message.acks,
                    *message.commands,
                    *message.problems,
                )
                return tuple(effect for answer in answers for effect in self.receive(answer))

    def _welcome(self, message: wire.Welcome) -> tuple[Effect, ...]:
        if message.protocol != wire.PROTOCOL_VERSION:
            return (Stopped(problem=_unknown_protocol(message)),)
        self.window_bytes, self.heartbeat_s = max(1, message.window_bytes), message.heartbeat_s
        stored = {(ack.rank, ack.attempt): ack.seq for ack in message.acked}
        self._num_welcomes += 1
        answered = {
            rank: source
            for rank, source in self._sources.items()
            if 0 < source.hello_number <= self._num_welcomes
        }
        for rank, source in answered.items():
            seq = stored.get((rank, source.info.attempt), 0)
            if source.welcomed:
                # A second hello on the same connection was about new ranks: the others are in the middle of sending.
                source.acknowledge(seq)
            else:
                source.welcomed = True
                # The server's word wins, also where it has less than it once said: its database may be an older copy.
                source.acked = seq
                source.rewind(seq + 1)
        return tuple(Acknowledged(rank=rank, seq=source.acked) for rank, source in answered.items())

    def _ack(self, message: wire.Ack) -> tuple[Effect, ...]:
        source = self._addressed(message.rank, message.attempt)
        if source is None:
            return ()
        source.acknowledge(message.seq)
        acknowledged = Acknowledged(rank=message.rank, seq=source.acked)
        if not message.rejected:
            return (acknowledged,)
        return (Refused(rank=message.rank, rejections=message.rejected), acknowledged)

    def _problem(self, message: wire.Problem) -> tuple[Effect, ...]:
        if message.fatal:
            return (Stopped(problem=message),)
        source = self._addressed(message.rank, message.attempt)
        if message.expected_seq is None or source is None:
            return (RetryLater(problem=message),)
        # What it expects tells what it has seen, not what is durable: only less than we believed is news.
        source.acked = min(source.acked, message.expected_seq - 1)
        source.rewind(message.expected_seq)
        return (Rewound(rank=source.info.rank, seq=message.expected_seq, message=message.message),)

    def _addressed(self, rank: int | None, attempt: int | None) -> _Source | None:
        source = None if rank is None else self._sources.get(rank)
        return source if source is not None and source.info.attempt == attempt else None


def _unknown_protocol(message: wire.Welcome) -> wire.Problem:
    return wire.Problem(
        code="unknown_protocol",
        message=f"the server ({message.server_version}) speaks protocol {message.protocol}, "
        f"this agent {wire.PROTOCOL_VERSION}",
        remedy="Install the same version of gradiometer on both sides, then run `gradiometer sync`.",
        fatal=True,
    )
