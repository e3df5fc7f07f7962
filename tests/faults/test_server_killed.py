"""`kill -9` of the real server in the middle of ingest: what was acknowledged is there, once, and nothing else is lost."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable

import pytest
from websockets.exceptions import WebSocketException

from gradiometer import wire
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient

KILLS = 20
LAYERS = 8
SCHEMAS = (
    wire.encode(wire.ScalarSchema(schema_id=1, columns=(wire.Column(name="train/loss"),))),
    wire.encode(
        wire.LayerSchema(
            schema_id=2, layers=tuple(wire.Layer(name=f"w{i}", shape=(4,), numel=4) for i in range(LAYERS))
        )
    ),
)


def record(seq: int) -> bytes:
    """Record `seq` of the stream: two schemas, then for each step its loss and its layers."""
    if seq <= 2:
        return SCHEMAS[seq - 1]
    step, is_layers = divmod(seq - 3, 2)
    values = (4.0, 1.0, float(step + 1), 0.0, 1.0, 0.0, 0.0) * LAYERS if is_layers else (step * 0.5,)
    return wire.encode(
        wire.Frame(
            schema_id=2 if is_layers else 1,
            steps=(step,),
            times=(1.8e9 + step,),
            values=struct.pack(f"<{len(values)}d", *values),
        )
    )


class Sender(threading.Thread):
    """Streams records as an agent does: from the last ack, over any number of connections, until told to end."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server, self.acked, self.ending = server, 0, threading.Event()
        self.welcomed_below: list[tuple[int, int]] = []

    def run(self) -> None:
        while not self.ending.is_set():
            try:
                with WireClient(self._server.url, "r") as client:
                    self._stream(client)
            except (OSError, WebSocketException, TimeoutError):
                time.sleep(0.01)

    def _stream(self, client: WireClient) -> None:
        client.hello()
        if client.next_seq <= self.acked:
            self.welcomed_below.append((client.next_seq, self.acked))
        while not self.ending.is_set():
            first = client.next_seq
            self.acked = client.send(*(record(seq) for seq in range(first, first + 10))).seq


def raw_points(server: Server, num_steps: int) -> tuple[list[int], list[float], list[int]]:
    """Steps, values and counts of the loss, in ranges that are small enough to come as single points."""
    steps: list[int] = []
    values: list[float] = []
    counts: list[int] = []
    for begin in range(0, num_steps, 2000):
        end = min(begin + 1999, num_steps - 1)
        wanted = {"series": [{"run": "r", "metric": "train/loss"}], "from": begin, "to": end, "buckets": 2000}
        answer = server.post("/series/query", wanted)["series"][0]
        assert answer["bucket_width"] == 1
        steps += answer["points"]["step"]
        values += answer["points"]["mean"]
        counts += answer["points"]["count"]
    return steps, values, counts


@pytest.mark.slow
def test_twenty_kills_lose_and_double_nothing(server: Callable[..., Server]) -> None:
    one, chance = server(), random.Random(11)
    sender = Sender(one)
    sender.start()
    kills_under_way = 0
    for _ in range(KILLS):
        before = sender.acked
        eventually(lambda before=before: sender.acked > before, 30.0, what="acks flow")
        time.sleep(chance.uniform(0, 0.3))  # a random moment is the point here, not a condition
        kills_under_way += sender.acked > before
        one.kill()
        one.start()
    sender.ending.set()
    sender.join(30.0)
    assert kills_under_way == KILLS, "every kill fell into a stream"
    assert sender.welcomed_below == [], "no acknowledged record was asked for again"
    num_steps = (sender.acked - 2) // 2
    expected = {step: step * 0.5 for step in range(num_steps)}

    def stored() -> bool:
        steps, values, counts = raw_points(one, num_steps)
        assert len(steps) == len(set(steps)), "no step is double"
        assert set(counts) == {1}, "no point is double"
        got = dict(zip(steps, values, strict=True))
        assert set(expected) <= set(got), "no acknowledged step is missing"
        return all(got[step] == value for step, value in expected.items())

    eventually(stored, 30.0, what="every step once")
    flow = one.get("/runs/r/layers/flow", step=num_steps - 1)
    assert flow["step"] == num_steps - 1
    assert flow["statistics"]["norm"] == pytest.approx([num_steps**0.5] * LAYERS)
    metrics = {metric["name"]: metric for metric in one.get("/runs/r/metrics")["metrics"]}
    assert metrics["train/loss"]["last_step"] >= num_steps - 1
    assert one.get("/runs/r")["rejected_records"] == 0
    assert one.get("/runs/r/alerts")["alerts"] == []
