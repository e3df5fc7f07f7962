"""A server's ingest for tests of the uplink: keeps records in a dictionary, and fails in every way on demand."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from gradiometer import wire
from tests.support.eventually import eventually

SourceKey = tuple[str, int, int]


class IngestModel:
    """What a correct server does with messages, without any transport. Records stay over connections and restarts.

    Attributes:
        stored: durable records by (run, attempt, rank).
        num_repeats: records that came again.
        refuse: codes of records to refuse, by their content.
        gaps: answer this many messages of records as if the one before had been lost.
    """

    def __init__(self, *, window_bytes: int = 4 * 1024 * 1024, heartbeat_s: float = 0.2) -> None:
        self.stored: dict[SourceKey, list[bytes]] = {}
        self.runs: dict[str, wire.RunInfo] = {}
        self.statuses: list[wire.Status] = []
        self.num_repeats = 0
        self.refuse: dict[bytes, str] = {}
        self.gaps = 0
        self.window_bytes, self.heartbeat_s = window_bytes, heartbeat_s

    def records(self, rank: int = 0) -> list[bytes]:
        """Everything of one rank, over all runs and attempts."""
        return [record for key, records in self.stored.items() if key[2] == rank for record in records]

    def exits(self, rank: int = 0) -> list[dict[str, object]]:
        """Attributes of the exit events of one rank."""
        found = []
        for record in self.records(rank):
            with contextlib.suppress(wire.WireError):
                event = wire.decode_record(record)
                if isinstance(event, wire.Event) and event.kind == "exit":
                    found.append(event.attributes)
        return found

    def welcome(self, hello: wire.Hello) -> wire.Welcome:
        run_id = hello.run.run_id
        self.runs[run_id] = hello.run
        acked = []
        for source in hello.sources:
            stored = self.stored.setdefault((run_id, source.attempt, source.rank), [])
            acked.append(wire.SourceAck(rank=source.rank, attempt=source.attempt, seq=len(stored)))
        return wire.Welcome(
            protocol=wire.PROTOCOL_VERSION,
            server_version="double",
            acked=tuple(acked),
            window_bytes=self.window_bytes,
            heartbeat_s=self.heartbeat_s,
        )

    def take(self, run_id: str, message: wire.Records) -> wire.Ack | wire.Problem:
        stored = self.stored[run_id, message.attempt, message.rank]
        expected_seq = len(stored) + 1
        if self.gaps or message.first_seq > expected_seq:
            self.gaps = max(0, self.gaps - 1)
            return wire.Problem(
                code="sequence_gap",
                message=f"expected {expected_seq}",
                rank=message.rank,
                attempt=message.attempt,
                expected_seq=expected_seq,
            )
        new = message.records[expected_seq - message.first_seq :]
        self.num_repeats += len(message.records) - len(new)
        rejected = tuple(
            wire.Rejection(seq=expected_seq + index, code=self.refuse[record], message="refused by the test")
            for index, record in enumerate(new)
            if record in self.refuse
        )
        stored.extend(new)
        return wire.Ack(rank=message.rank, attempt=message.attempt, seq=len(stored), rejected=rejected)


@dataclasses.dataclass(slots=True)
class Behaviour:
    """How `IngestDouble` fails; change it while it runs."""

    token: str | None = None
    refuse_upgrade: int | None = None
    fatal: wire.Problem | None = None
    busy: int = 0
    """Answer this many messages of records with "try later"."""
    die_before_ack: int = 0
    """Store this many messages and cut the connection instead of acknowledging them."""
    mute: bool = False
    """Store everything and say nothing."""
    answer_after_s: float = 0.0
    """Let everybody wait so long for each answer."""
    drop_every: int = 0
    """Cut the connection instead of taking every so-manieth message of records; 0: none."""


class IngestDouble:
    """`IngestModel` behind a real WebSocket on 127.0.0.1; the port stays the same over `stop` and `start`."""

    def __init__(self, model: IngestModel | None = None) -> None:
        self.model = model or IngestModel()
        self.behaviour = Behaviour()
        self.port = 0
        self.num_connections = 0
        self.num_upgrades = 0
        self.num_messages = 0
        self.headers: list[dict[str, str]] = []
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._open: set[ServerConnection] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> IngestDouble:
        self._server = serve(
            self._serve,
            "127.0.0.1",
            self.port,
            subprotocols=[wire.SUBPROTOCOL],  # type: ignore[list-item]
            compression=None,
            max_size=wire.MAX_MESSAGE_BYTES,
            process_request=self._process_request,
        )
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End as a killed process does: no farewell on any connection."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self.cut()
        eventually(lambda: not self._open, what="every connection of the double ended")
        self._server = self._thread = None

    def cut(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.socket.shutdown(2)

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        self.num_upgrades += 1
        self.headers.append({name.lower(): value for name, value in request.headers.raw_items()})
        self.headers[-1]["path"] = request.path
        if self.behaviour.refuse_upgrade:
            return connection.respond(HTTPStatus(self.behaviour.refuse_upgrade), "refused by the test\n")
        token = self.behaviour.token
        if token is not None and request.headers.get("Authorization") != f"Bearer {token}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "wrong token\n")
        return None

    def _serve(self, connection: ServerConnection) -> None:
        self.num_connections += 1
        self._open.add(connection)
        run_id = ""
        try:
            for data in connection:
                assert isinstance(data, bytes)
                message = wire.decode_client_message(data)
                if isinstance(message, wire.Hello):
                    run_id = message.run.run_id
                time.sleep(self.behaviour.answer_after_s)
                answer = self._answer(run_id, message)
                if answer == "die":
                    connection.socket.shutdown(2)
                elif answer is not None and not isinstance(answer, str):
                    connection.send(wire.encode(answer))
        except (ConnectionClosed, OSError):
            pass
        finally:
            self._open.discard(connection)

    def _answer(self, run_id: str, message: wire.ClientMessage) -> wire.ServerMessage | str | None:
        behaviour = self.behaviour
        match message:
            case wire.Hello():
                return behaviour.fatal or self.model.welcome(message)
            case wire.Status():
                self.model.statuses.append(message)
                return None
            case wire.Records():
                self.num_messages += 1
                if behaviour.drop_every and self.num_messages % behaviour.drop_every == 0:
                    return "die"
                if behaviour.busy:
                    behaviour.busy -= 1
                    return wire.Problem(code="store_unavailable", message="the disk is full", remedy="Wait.")
                answer = self.model.take(run_id, message)
                if behaviour.die_before_ack:
                    behaviour.die_before_ack -= 1
                    return "die"
                return None if behaviour.mute else answer
            case wire.Batch():
                raise AssertionError("a batch on a WebSocket")


class PostDouble:
    """`IngestModel` behind plain HTTP: refuses every WebSocket, as some proxies do, and takes POST."""

    def __init__(self, model: IngestModel, *, status_of_get: int = 400) -> None:
        self.model = model
        self.num_gets = 0
        self.num_posts = 0
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                double.num_gets += 1
                self.send_response(status_of_get)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                double.num_posts += 1
                batch = wire.decode_client_message(self.rfile.read(int(self.headers["Content-Length"])))
                assert isinstance(batch, wire.Batch)
                body = wire.encode(double.answer(batch))
                self.send_response(200)
                self.send_header("Content-Type", "application/msgpack")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/prefix"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def answer(self, batch: wire.Batch) -> wire.BatchResult:
        welcome = self.model.welcome(batch.hello)
        answers = [self.model.take(batch.hello.run.run_id, records) for records in batch.records]
        if batch.status is not None:
            self.model.statuses.append(batch.status)
        return wire.BatchResult(
            welcome=welcome,
            acks=tuple(answer for answer in answers if isinstance(answer, wire.Ack)),
            problems=tuple(answer for answer in answers if isinstance(answer, wire.Problem)),
        )

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> float:
    """Seconds until `condition` held."""
    started_s = time.monotonic()
    eventually(condition, timeout_s, interval_s=0.01)
    return time.monotonic() - started_s
