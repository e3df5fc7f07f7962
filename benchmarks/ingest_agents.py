"""Agents of `ingest.py`: one WebSocket connection for each source, speaking the real protocol, and what they send.

Shape letters: R ranks, S steps, L layers, P partial statistics (`wire.STATISTICS`), C columns.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect

from gradiometer import wire

START_S = 1_800_000_000.0
MESSAGE_BYTES = 1024 * 1024
"""As the uplink sends them: at most a quarter of the window, and at most this."""
ACK_TIMEOUT_S = 120.0
ATTEMPT = 1_800_000_000_000
COUNT, SUM, SUM_SQUARES, MIN, MAX, NUM_ZEROS, NUM_NONFINITE = range(7)


class Agent:
    """One rank of one run. `latencies_s`: from the send of each message to its ack."""

    def __init__(self, url: str, run_id: str, *, rank: int = 0, world_size: int = 1) -> None:
        self._address = url.replace("http", "ws", 1) + "/api/v1/ingest"
        self.run = wire.RunInfo(run_id=run_id, project="benchmark", name=run_id, created_s=START_S)
        self.source = wire.SourceInfo(rank=rank, attempt=ATTEMPT, world_size=world_size)
        self.latencies_s: list[float] = []
        self._sent: deque[tuple[int, int, float]] = deque()
        self._in_flight = self._window = 0
        self._seq = 0
        self._acked = asyncio.Event()

    async def open(self) -> Agent:
        self._socket: ClientConnection = await connect(
            self._address,
            subprotocols=[wire.SUBPROTOCOL],  # type: ignore[list-item]
            max_size=wire.MAX_MESSAGE_BYTES,
            compression=None,
            proxy=None,
            open_timeout=60,
            ping_interval=None,
        )
        hello = wire.Hello(
            protocol=wire.PROTOCOL_VERSION, agent_version="benchmark", run=self.run, sources=(self.source,)
        )
        await self._socket.send(wire.encode(hello))
        welcome = wire.decode_server_message(await self._socket.recv())  # type: ignore[arg-type]
        assert isinstance(welcome, wire.Welcome), welcome
        self._window = welcome.window_bytes
        self._reader = asyncio.create_task(self._read())
        return self

    async def send(self, *records: bytes) -> None:
        """Number the records and send them as one message, as soon as the window has room."""
        message = wire.encode(
            wire.Records(rank=self.source.rank, attempt=ATTEMPT, first_seq=self._seq + 1, records=records)
        )
        while self._in_flight and self._in_flight + len(message) > self._window:
            await self._next_ack()
        self._seq += len(records)
        self._in_flight += len(message)
        self._sent.append((self._seq, len(message), time.perf_counter()))
        await self._socket.send(message)

    async def _read(self) -> None:
        async for data in self._socket:
            answer = wire.decode_server_message(data)  # type: ignore[arg-type]
            if not isinstance(answer, wire.Ack) or answer.rejected:
                raise RuntimeError(f"the server did not take a message: {answer}")
            now_s = time.perf_counter()
            while self._sent and self._sent[0][0] <= answer.seq:
                _, num_bytes, sent_s = self._sent.popleft()
                self._in_flight -= num_bytes
                self.latencies_s.append(now_s - sent_s)
            self._acked.set()

    async def _next_ack(self) -> None:
        self._acked.clear()
        await asyncio.wait_for(self._acked.wait(), ACK_TIMEOUT_S)

    async def drained(self) -> None:
        """Everything sent is acknowledged."""
        while self._sent:
            await self._next_ack()

    async def close(self) -> None:
        await self._socket.close()
        await self._reader


async def send_all(agent: Agent, records: Sequence[bytes]) -> None:
    """As fast as the window allows, in messages as large as the uplink makes them."""
    message: list[bytes] = []
    size = 0
    for record in records:
        if message and size + len(record) > MESSAGE_BYTES:
            await agent.send(*message)
            message, size = [], 0
        message.append(record)
        size += len(record)
    await agent.send(*message)
    await agent.drained()


def frame(schema_id: int, first_step: int, values_SC: NDArray[np.float64], *, step_s: float = 0.01) -> bytes:
    """A record of consecutive steps; times have a jitter of some microseconds, as clocks do."""
    steps = range(first_step, first_step + len(values_SC))
    return wire.encode(
        wire.Frame(
            schema_id=schema_id,
            steps=tuple(steps),
            times=tuple(START_S + step * step_s + (step * 7919 % 1013) * 1e-6 for step in steps),
            values=values_SC.astype("<f8").tobytes(),
        )
    )


def layer_schema(num_layers: int, *, rank: int = 0, num_shards: int = 1) -> bytes:
    """Schema 1: `num_layers` layers of which this rank holds one shard of 4,096 elements."""
    numel = 4096 * num_shards
    shard = (rank,) if num_shards > 1 else ()
    layers = tuple(
        wire.Layer(f"layers.{index}.weight", (numel,), numel, shard, num_shards)
        for index in range(num_layers)
    )
    return wire.encode(wire.LayerSchema(schema_id=1, layers=layers))


def scalar_schema(*names: str) -> bytes:
    """Schema 2: one column for each name."""
    return wire.encode(wire.ScalarSchema(schema_id=2, columns=tuple(map(wire.Column, names))))


def partials(num_steps: int, num_layers: int, seed: int = 0) -> NDArray[np.float64]:
    """Partial statistics (S, L, P): each layer's norm is exp(random walk) with 5 % of noise.

    Sums are whole numbers, so that any order of adding them up gives the same bits.
    """
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_layers)
    level_SL = noisy_walks(num_steps, num_layers, seed)
    noisy_SL = noisy_walks(num_steps, num_layers, seed + 1)
    partials_SLP = np.zeros((*shape, len(wire.STATISTICS)))
    partials_SLP[..., COUNT] = 4096
    partials_SLP[..., SUM] = np.rint(rng.normal(size=shape) * level_SL * 2**16)
    partials_SLP[..., SUM_SQUARES] = np.rint(noisy_SL**2 * 2**24)
    partials_SLP[..., MIN] = -level_SL * rng.exponential(size=shape)
    partials_SLP[..., MAX] = level_SL * rng.exponential(size=shape)
    partials_SLP[..., NUM_ZEROS] = rng.binomial(4096, 0.01, shape)
    return partials_SLP


def noisy_walks(num_steps: int, num_columns: int, seed: int = 0) -> NDArray[np.float64]:
    """Scalars (S, C): exp(random walk) with 5 % of noise, to the last bit of a float64."""
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_columns)
    level_SC = np.exp(np.cumsum(rng.normal(0, 0.001, shape), axis=0) + rng.normal(0, 1, num_columns))
    return level_SC * (1 + 0.05 * rng.normal(size=shape))


def merged(partials_RLP: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the ranks together say of one step (L, P)."""
    merged_LP: NDArray[np.float64] = partials_RLP.sum(axis=0)
    merged_LP[:, MIN] = partials_RLP[:, :, MIN].min(axis=0)
    merged_LP[:, MAX] = partials_RLP[:, :, MAX].max(axis=0)
    return merged_LP


def layer_statistics(partials_SLP: NDArray[np.float64]) -> dict[str, NDArray[np.float32]]:
    """What people read of these (S, L), as float32: the definitions of docs/statistics.md."""
    count, total, squares = (partials_SLP[..., column] for column in (COUNT, SUM, SUM_SQUARES))
    mean = total / count
    statistics = {
        "norm": np.sqrt(squares),
        "rms": np.sqrt(squares / count),
        "mean": mean,
        "std": np.sqrt(np.maximum(squares / count - mean * mean, 0.0)),
        "abs_max": np.maximum(-partials_SLP[..., MIN], partials_SLP[..., MAX]),
        "zero_fraction": partials_SLP[..., NUM_ZEROS] / count,
        "num_nonfinite": partials_SLP[..., NUM_NONFINITE],
    }
    return {name: values.astype(np.float32) for name, values in statistics.items()}
