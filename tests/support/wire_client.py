"""Speaks the agents' wire protocol by hand: what a test sends is exactly what it says, valid or not."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import TracebackType

from websockets.sync.client import ClientConnection, connect

from gradiometer import wire

LAYER_WIDTH = len(wire.STATISTICS)


def scalar_schema(*names: str, schema_id: int = 1, merge: str = "mean") -> bytes:
    """An encoded schema record with one column per name."""
    columns = tuple(wire.Column(name, merge) for name in names)  # type: ignore[arg-type]
    return wire.encode(wire.ScalarSchema(schema_id=schema_id, columns=columns))


def layer_schema(*layers: tuple[str, int], schema_id: int = 2) -> bytes:
    """An encoded schema record of unsharded one-dimensional layers given as (name, number of elements)."""
    described = tuple(wire.Layer(name, (numel,), numel) for name, numel in layers)
    return wire.encode(wire.LayerSchema(schema_id=schema_id, layers=described))


def frame(rows: dict[int, Sequence[float]], *, schema_id: int = 1, time_s: float = 1_800_000_000.0) -> bytes:
    """An encoded frame: for each step its row of values; step k is stamped `time_s` + k."""
    values = [value for row in rows.values() for value in row]
    return wire.encode(
        wire.Frame(
            schema_id=schema_id,
            steps=tuple(rows),
            times=tuple(time_s + step for step in rows),
            values=struct.pack(f"<{len(values)}d", *values),
        )
    )


def exit_event(code: int | None = 0, *, signal: str | None = None, time_s: float = 1_800_000_000.0) -> bytes:
    """An encoded exit record: closes the source."""
    attributes = {"code": code, "signal": signal, "inferred": False, "reason": ""}
    return wire.encode(wire.Event(kind="exit", time=time_s, attributes=attributes))


class WireClient:
    """One source on one WebSocket connection.

    Use as a context manager. `hello()` says who we are and returns the welcome; `send()` numbers records by itself
    and waits for the ack; `send_raw()` sends any bytes and `receive()` reads the next message.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        project: str = "tests",
        rank: int = 0,
        world_size: int = 1,
        attempt: int = 1_800_000_000_000,
        token: str | None = None,
    ) -> None:
        self.run = wire.RunInfo(run_id=run_id, project=project, name=run_id, created_s=1_800_000_000.0)
        self.source = wire.SourceInfo(rank=rank, attempt=attempt, world_size=world_size, host="test", pid=1)
        self.next_seq = 1
        address = url.replace("http", "ws", 1) + "/api/v1/ingest"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._socket: ClientConnection = connect(
            address,
            subprotocols=[wire.SUBPROTOCOL],  # type: ignore[list-item]
            additional_headers=headers,
            max_size=wire.MAX_MESSAGE_BYTES,
            open_timeout=10,
            proxy=None,
        ).__enter__()  # closed by `close`, whoever calls it

    def __enter__(self) -> WireClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hello(self, *, protocol: int = wire.PROTOCOL_VERSION) -> wire.ServerMessage:
        """Introduce this source; a welcome also sets the number of the next record."""
        message = wire.Hello(protocol=protocol, agent_version="test", run=self.run, sources=(self.source,))
        self.send_raw(wire.encode(message))
        answer = self.receive()
        if isinstance(answer, wire.Welcome):
            mine = [ack.seq for ack in answer.acked if ack.rank == self.source.rank]
            self.next_seq = max(mine, default=0) + 1
        return answer

    def send(self, *records: bytes, timeout_s: float = 10.0) -> wire.Ack:
        """Send records with the next numbers and return the ack that covers them all.

        Raises:
            AssertionError: the server answered with a problem instead.
        """
        self.post(*records)
        rejected: list[wire.Rejection] = []
        while True:
            answer = self.receive(timeout_s)
            assert isinstance(answer, wire.Ack), f"expected an ack, received {answer!r}"
            rejected += answer.rejected
            if answer.seq >= self.next_seq - 1:
                return wire.Ack(
                    rank=answer.rank, attempt=answer.attempt, seq=answer.seq, rejected=tuple(rejected)
                )

    def post(self, *records: bytes, first_seq: int | None = None) -> None:
        """Send records without waiting for an answer; `first_seq` overrides the running number."""
        first = self.next_seq if first_seq is None else first_seq
        message = wire.Records(
            rank=self.source.rank, attempt=self.source.attempt, first_seq=first, records=records
        )
        self.send_raw(wire.encode(message))
        if first_seq is None:
            self.next_seq += len(records)

    def send_raw(self, data: bytes | str) -> None:
        """Send one WebSocket message as it is."""
        self._socket.send(data)

    def receive(self, timeout_s: float = 10.0) -> wire.ServerMessage:
        """Next message of the server.

        Raises:
            TimeoutError: nothing came in time.
            websockets.exceptions.ConnectionClosed: the server closed; carries code and reason.
        """
        data = self._socket.recv(timeout_s)
        assert isinstance(data, bytes), f"the server sent text: {data!r}"
        return wire.decode_server_message(data)

    def close(self) -> None:
        """Close the connection in order."""
        self._socket.close()
