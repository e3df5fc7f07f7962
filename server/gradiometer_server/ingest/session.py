"""One agent's conversation, without any I/O: what a hello, records or a status mean, and what to answer.

The caller owns the connection and the store. It feeds decoded messages in, looks up what the store knows of each
source (`resume`), makes `Accepted.entries` durable, and only then sends `Accepted.ack`.

    hello -> (store: rows of run and sources) -> resume per source -> welcome
    records -> Accepted | Problem -> (store: commit) -> ack
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradiometer import wire
from gradiometer_server.errors import ProtocolError
from gradiometer_server.ingest.checks import Fault, KnownSchema, hello_fault, known_schema, record_fault
from gradiometer_server.ingest.cleaning import cleaned

logger = logging.getLogger(__name__)

SourceName = tuple[int, int]
"""(rank, attempt): names a source within a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What one `Records` message came to.

    Attributes:
        entries: (seq, encoded, decoded) of the records to make durable, in order; repeated and refused ones left out.
        first_seq: number of the first record that was new; `last_seq`: of the last one, also if it was refused.
        rejected: refused records among them.
        num_bytes: size of the entries.
        num_repeated: records of the message that were there already.
    """

    rank: int
    attempt: int
    first_seq: int
    last_seq: int
    entries: tuple[tuple[int, bytes, wire.Record], ...]
    rejected: tuple[wire.Rejection, ...]
    num_bytes: int
    num_repeated: int = 0

    def ack(self) -> wire.Ack:
        """The answer, to be sent after the commit."""
        return wire.Ack(rank=self.rank, attempt=self.attempt, seq=self.last_seq, rejected=self.rejected)


@dataclass(slots=True)
class _Source:
    """Where a source stands on this connection."""

    next_seq: int
    schemas: dict[int, KnownSchema] = field(default_factory=dict)


class Session:
    """State of one connection, or of one POST. Not thread-safe: one task feeds it."""

    def __init__(self) -> None:
        self._run_id: str | None = None
        self._sources: dict[SourceName, _Source] = {}

    @property
    def run_id(self) -> str | None:
        """Public id of the run that said hello; None before."""
        return self._run_id

    def hello(self, hello: wire.Hello) -> wire.Hello:
        """Check a hello; it may come again when another rank of the node appears.

        Returns:
            The hello with a description of the run that can be kept.

        Raises:
            ProtocolError: fatal, with the field and the remedy.
        """
        fault = hello_fault(hello)
        if fault is not None:
            raise _error(fault, fatal=True)
        if self._run_id not in (None, hello.run.run_id):
            raise ProtocolError(
                f"hello: run {hello.run.run_id!r} on the connection of run {self._run_id!r}",
                code="wrong_run",
                remedy="open one connection per run",
                fatal=True,
            )
        self._run_id = hello.run.run_id
        hello, changed = cleaned(hello)
        if changed:
            logger.warning("run %s: made to fit: %s", self._run_id, ", ".join(changed))
        return hello

    def resume(self, source: SourceName, *, acked_seq: int, schemas: Mapping[int, KnownSchema]) -> None:
        """Tell what the store holds of a source: its last durable record and the schemas it declared."""
        self._sources[source] = _Source(next_seq=acked_seq + 1, schemas=dict(schemas))

    def welcome(self, *, server_version: str, window_bytes: int) -> wire.Welcome:
        """Answer to the last hello: where every source of this connection goes on."""
        acked = (
            wire.SourceAck(rank=rank, attempt=attempt, seq=source.next_seq - 1)
            for (rank, attempt), source in sorted(self._sources.items())
        )
        return wire.Welcome(
            protocol=wire.PROTOCOL_VERSION,
            server_version=server_version,
            acked=tuple(acked),
            window_bytes=window_bytes,
        )

    def records(self, message: wire.Records) -> Accepted:
        """Sort out a message of records: repeated ones are dropped silently, bad ones refused one by one.

        # Hot path: once per message of every agent; must not look at values one by one.

        Raises:
            ProtocolError: `hello_expected`, `unknown_source`, or `sequence_gap`. Nothing was accepted; only the
                first of them is fatal. For a gap, `expected_seq` tells where to go on.
        """
        source = self._known(message)
        if message.first_seq < 1 or message.first_seq > source.next_seq:
            raise ProtocolError(
                f"{self._where(message)}: record {message.first_seq} came, record {source.next_seq} was expected",
                code="sequence_gap",
                remedy=f"resend from record {source.next_seq}",
            )
        first_seq = source.next_seq
        fresh = message.records[first_seq - message.first_seq :]
        entries: list[tuple[int, bytes, wire.Record]] = []
        rejected: list[wire.Rejection] = []
        for seq, data in enumerate(fresh, first_seq):
            record = self._judge(message, source, seq, data)
            if isinstance(record, wire.Rejection):
                rejected.append(record)
            else:
                entries.append((seq, data, record))
        source.next_seq = first_seq + len(fresh)
        return Accepted(
            rank=message.rank,
            attempt=message.attempt,
            first_seq=first_seq,
            last_seq=source.next_seq - 1,
            entries=tuple(entries),
            rejected=tuple(rejected),
            num_bytes=sum(len(data) for _, data, _ in entries),
            num_repeated=len(message.records) - len(fresh),
        )

    def forget(self, source: SourceName) -> None:
        """Its records were not written and the store does not say how far it got: ask for a new hello."""
        self._sources.pop(source, None)

    def expected_seq(self, source: SourceName) -> int | None:
        """Number of the next record of `source`; None if it is not known here."""
        known = self._sources.get(source)
        return None if known is None else known.next_seq

    def _known(self, message: wire.Records) -> _Source:
        if self._run_id is None:
            raise ProtocolError(
                "records came before a hello", code="hello_expected", remedy="send a hello first", fatal=True
            )
        source = self._sources.get((message.rank, message.attempt))
        if source is None:
            raise ProtocolError(
                f"{self._where(message)}: no hello of this connection names that source",
                code="unknown_source",
                remedy="send a hello that lists it, then its records",
            )
        return source

    def _judge(
        self, message: wire.Records, source: _Source, seq: int, data: bytes
    ) -> wire.Record | wire.Rejection:
        fault: Fault | None
        if len(data) > wire.MAX_RECORD_BYTES:
            fault = Fault(
                code="record_too_large",
                message=f"{len(data)} bytes; at most {wire.MAX_RECORD_BYTES}",
                remedy="split the frame into fewer steps",
            )
            return self._refuse(message, seq, fault)
        try:
            record = wire.decode_record(data)
        except wire.WireError as error:
            fault = Fault(
                code="malformed_record", message=str(error), remedy="upgrade the agent, or report this"
            )
            return self._refuse(message, seq, fault)
        fault = record_fault(record, source.schemas)
        if fault is not None:
            return self._refuse(message, seq, fault)
        if isinstance(record, (wire.ScalarSchema, wire.LayerSchema)):
            source.schemas[record.schema_id] = known_schema(record)
        return record

    def _refuse(self, message: wire.Records, seq: int, fault: Fault) -> wire.Rejection:
        text = f"{self._where(message)}, record {seq}: {fault.message}. {fault.remedy}."
        return wire.Rejection(seq=seq, code=fault.code, message=text)

    def _where(self, message: wire.Records) -> str:
        return f"run {self._run_id}, attempt {message.attempt}, rank {message.rank}"


def problem_of(
    error: ProtocolError, *, source: SourceName | None = None, expected_seq: int | None = None
) -> wire.Problem:
    """The message that tells the agent about `error`."""
    rank, attempt = source if source is not None else (None, None)
    return wire.Problem(
        code=error.code,
        message=error.message,
        remedy=error.remedy,
        fatal=error.fatal,
        rank=rank,
        attempt=attempt,
        expected_seq=expected_seq,
    )


def _error(fault: Fault, *, fatal: bool) -> ProtocolError:
    return ProtocolError(fault.message, code=fault.code, remedy=fault.remedy, fatal=fatal)
