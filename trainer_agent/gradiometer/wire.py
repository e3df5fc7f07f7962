"""The contract between agent and server: every message and record that crosses the network.

Two levels, both msgpack:

* a *record* (`ScalarSchema`, `LayerSchema`, `Frame`, `Event`, `Detail`) is what one source says; it is encoded once
  by the trainer, gets a sequence number in the spool and travels as an opaque byte string to the server's durable log;
* a *message* (`Hello`, `Records`, `Status` up; `Welcome`, `Ack`, `Problem`, `Command` down) carries records over one
  WebSocket (subprotocol `gradiometer.v1`) or in one HTTP POST body (`Batch`).

A *source* is one writer: a rank in one attempt. Its records are numbered 1, 2, 3, ... without holes, so a resend
is harmless and a hole is an error that names the number expected.

Floats travel as little-endian IEEE-754 blocks: NaN payloads, infinities and subnormals arrive bit for bit.
This module needs only msgspec: neither torch nor numpy. Names are judged in `names`, offered here as well.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from gradiometer import limits as limits
from gradiometer.limits import HISTOGRAM_BINS as HISTOGRAM_BINS
from gradiometer.limits import MAX_ID_CHARS as MAX_ID_CHARS
from gradiometer.names import MAX_NAME_CHARS as MAX_NAME_CHARS
from gradiometer.names import fitting_name as fitting_name
from gradiometer.names import name_problem as name_problem

PROTOCOL_VERSION: Final = 1
SUBPROTOCOL: Final = "gradiometer.v1"

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
"""Largest message the server reads; a larger one is refused and the connection closed with code 1009."""
MAX_RECORD_BYTES: Final = 8 * 1024 * 1024
"""Largest encoded record. The agent splits frames to stay below it."""
MAX_COLUMNS: Final = 100_000
"""Most columns in one scalar schema, and most layers in one layer schema."""
MAX_STEP: Final = 2**53 - 1
"""Largest step: what a browser can still count exactly."""
MAX_DETAIL_STEPS: Final = 4096
"""Most steps in one `Detail`."""
MAX_REASON_CHARS: Final = 500
"""Longest reason of a `Detail` or a `Command`."""

STATISTICS: Final = ("count", "sum", "sum_squares", "min", "max", "num_zeros", "num_nonfinite")
"""The mergeable partial statistics of one parameter's local gradient, in wire order.

`count` is the number of elements read in this step. 0: the parameter had no gradient, and the other six mean nothing,
except that a NaN in `sum_squares` then says that it had one which could not be read. `sum`, `sum_squares`, `min` and
`max` are plain IEEE results over all elements, so a NaN or an infinity in the gradient shows in them; `num_nonfinite`
counts NaN, +Inf and -Inf together. All are of the unscaled, accumulated, pre-clip gradient.
"""
NORM_STATISTICS: Final = ("count", "sum_squares", "num_nonfinite")
"""The least that a layer schema may hold: what the norm and the search for NaN need. Others are left out of a step in
which they were not measured: never sent as 0 or NaN."""


class Column(msgspec.Struct, frozen=True, array_like=True):
    """One scalar metric of a schema: its name and how ranks combine into the merged value."""

    name: str
    merge: Literal["mean", "sum", "min", "max"] = "mean"


class Layer(msgspec.Struct, frozen=True, array_like=True):
    """One parameter as this rank holds it.

    Two ranks with the same `shard` hold equal copies (replicas); the server counts each (layer, shard) once. The
    local elements over all shards add up to `numel`.

    Attributes:
        name: the parameter's name with wrapper prefixes stripped.
        shape, numel: of the full, unsharded parameter.
        shard: coordinates of this rank on the sharded mesh dimensions; empty when not sharded.
        num_shards: product of the sizes of those mesh dimensions; 1 when not sharded.
        same_as: a layer of another watch that is this very parameter; totals of a step count the two once.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    shard: tuple[int, ...] = ()
    num_shards: int = 1
    same_as: str = ""


class ScalarSchema(msgspec.Struct, frozen=True, tag="scalars", kw_only=True):
    """Declares a set of scalar columns once; frames then carry only numbers (float64, shape (steps, columns))."""

    schema_id: int
    columns: tuple[Column, ...]


class LayerSchema(msgspec.Struct, frozen=True, tag="layers", kw_only=True):
    """Declares the layers of a source once, in depth order (the order of `named_parameters`).

    Frames then carry float64 of shape (steps, layers, len(statistics)). `statistics` is `STATISTICS` or a part of it
    in the same order that holds `NORM_STATISTICS`; a source may declare the same layers once for each such part, and
    uses for a step the one that says what was measured in it.
    """

    schema_id: int
    layers: tuple[Layer, ...]
    statistics: tuple[str, ...] = STATISTICS


class Frame(msgspec.Struct, frozen=True, tag="frame", kw_only=True):
    """Values of one schema for one or more steps.

    Attributes:
        schema_id: a schema declared earlier in the same source.
        steps: optimizer steps, 0 <= step <= MAX_STEP, any order.
        times: Unix seconds at which each step's values were taken; same length as `steps`.
        values: little-endian float64, row after row; exactly 8 * len(steps) * width bytes, where width is the
            number of columns, or of layers times statistics.
    """

    schema_id: int
    steps: tuple[int, ...]
    times: tuple[float, ...]
    values: bytes


EventKind = Literal[
    "exit", "exception", "marker", "alert", "unavailable", "nonfinite_activation", "dropped", "message", "environment",
    "dump", "check", "metric",
]  # fmt: skip


class Event(msgspec.Struct, frozen=True, tag="event", kw_only=True):
    """Something that happened, in the same sequence as the frames.

    `attributes` by kind:
        exit: code (int | None), signal (str | None, e.g. "SIGKILL"), inferred (bool), reason (str). Closes the source.
        exception: type, message, traceback (str; at most 16 KiB).
        marker: name (str): warm-up end, resume, evaluation, checkpoint, ...
        alert: title, text, severity (info | warning | error | critical): `run.alert()` from user code.
        unavailable: metric, reason: what cannot be collected, and why.
        nonfinite_activation: modules (list[str], first in forward order first; at most 20): whose output held
            NaN or Inf in the forward passes of this step. Precedes the step's frames.
        dropped: reports (int), reason, first_step, last_step: what the agent had to discard.
        message: text.
        environment: facts (dict of texts): what became known of the process after its hello; joins its environment.
        dump: path, reason, host (str), bytes (int): the flight recorder saved the state before this step there.
        check: check (stable id, e.g. "missing_zero_grad"), watch (name; "" for the first), title, text, advice,
            severity, metric (where it shows), count (int: times true so far), facts (numbers and names behind it): a
            mistake in the training loop that the agent can prove. Sent again at counts of 10, 100, ...
        metric: name (or a pattern with `*`), summary (last | min | max | mean | best), goal (minimize | maximize | None),
            step_metric: how the metric is to be summarised and over which other one it is drawn.
    """

    kind: EventKind
    time: float
    step: int | None = None
    attributes: dict[str, Any] = {}


class Detail(msgspec.Struct, frozen=True, tag="detail", kw_only=True):
    """What this rank alone holds, kept apart from what is merged: shipped when something went wrong, or on demand.

    Attributes:
        kind: "ring": the last steps before (and a few after) a trigger, each step shipped once; "histogram": counts.
        reason, trigger_step: what it was shipped for, in words (at most MAX_REASON_CHARS), and that step, if known.
        schema_id: a `LayerSchema` declared earlier in the same source.
        steps, times, values: as in `Frame`, of that schema; at most MAX_DETAIL_STEPS steps. Of a histogram, values are
            little-endian uint32 of shape (steps, layers, HISTOGRAM_BINS): elements per bin of log2 magnitude.
    """

    kind: Literal["ring", "histogram"]
    reason: str
    trigger_step: int | None = None
    schema_id: int
    steps: tuple[int, ...]
    times: tuple[float, ...]
    values: bytes


Record = ScalarSchema | LayerSchema | Frame | Event | Detail


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The run as the user named it. Sent with every hello; the server keeps the first and merges config."""

    run_id: str
    project: str
    name: str
    created_s: float
    config: dict[str, Any] = {}
    tags: tuple[str, ...] = ()
    notes: str = ""
    group: str | None = None


class SourceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One writer: a rank in one attempt.

    Attributes:
        attempt: launch time of the attempt in Unix milliseconds, the same on every rank of the launch; later
            launches are larger. The server shows ordinals 1, 2, ... in this order.
        start_step: steps complete before this attempt; older attempts are cut after them in the drawn line. 0: not told.
        environment: versions and hardware as strings (python, torch, device, command line without secrets).
    """

    rank: int
    attempt: int
    world_size: int = 1
    local_rank: int = 0
    host: str = ""
    pid: int = 0
    started_s: float = 0.0
    start_step: int = 0
    environment: dict[str, str] = {}


class SourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Health of one source as its uplink sees it."""

    rank: int
    attempt: int
    alive: bool
    spooled_seq: int
    spooled_bytes: int = 0
    dropped_reports: int = 0


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """First message of a connection; sent again when another rank of the node appears.

    `commands`: kinds of `Command` that this agent understands; one that names none is sent none.
    """

    protocol: int
    agent_version: str
    run: RunInfo
    sources: tuple[SourceInfo, ...]
    commands: tuple[str, ...] = ()


class Records(msgspec.Struct, frozen=True, tag="records", kw_only=True):
    """Consecutive encoded records of one source: numbers first_seq, first_seq + 1, ..."""

    rank: int
    attempt: int
    first_seq: int
    records: tuple[bytes, ...]


class Status(msgspec.Struct, frozen=True, tag="status", kw_only=True):
    """Heartbeat, every `Welcome.heartbeat_s` seconds while a source lives. Not numbered, not stored in the log."""

    sources: tuple[SourceStatus, ...]


class Batch(msgspec.Struct, frozen=True, tag="batch", kw_only=True):
    """Body of `POST /api/v1/ingest`: the WebSocket conversation in one request. The answer is a `BatchResult`."""

    hello: Hello
    records: tuple[Records, ...] = ()
    status: Status | None = None


class SourceAck(msgspec.Struct, frozen=True, kw_only=True):
    """Everything up to and including `seq` is durable; 0: nothing yet."""

    rank: int
    attempt: int
    seq: int


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A record that was refused and will not be asked for again; it stays counted on the run."""

    seq: int
    code: str
    message: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """Answer to `Hello`: where to resume each source, and how much may be in flight."""

    protocol: int
    server_version: str
    acked: tuple[SourceAck, ...]
    window_bytes: int = 4 * 1024 * 1024
    heartbeat_s: float = 2.0


class Ack(msgspec.Struct, frozen=True, tag="ack", kw_only=True):
    """Sent after the commit. `rejected` lists refused records among those acknowledged by this message."""

    rank: int
    attempt: int
    seq: int
    rejected: tuple[Rejection, ...] = ()


class Problem(msgspec.Struct, frozen=True, tag="problem", kw_only=True):
    """Something the peer must know.

    Attributes:
        code: stable identifier, e.g. `unknown_protocol`, `sequence_gap`, `store_unavailable`, `message_too_large`.
        message: what was wrong and where.
        remedy: what to do.
        fatal: True: do not retry without a change (keep the spool); False: retry from `expected_seq`, or later.
    """

    code: str
    message: str
    remedy: str = ""
    fatal: bool = False
    rank: int | None = None
    attempt: int | None = None
    expected_seq: int | None = None


class Command(msgspec.Struct, frozen=True, tag="command", kw_only=True):
    """Something that the server asks the agents of a run to do; one that is not understood is ignored.

    It may come more than once; whoever carries it out remembers the ids.

    Attributes:
        id: names this command within the run.
        kind: "ring": send the last steps in full detail (`Detail`); "dump": let the flight recorder save, if it is on;
            "histogram": take one at the first reading of `step` or a later one (None: at the next), and send it.
        rank: for this rank alone; None: for every rank.
        reason: for a person, e.g. the alert that it is sent for; on_alert: whether it is sent for one.
        step: the step that it is about.
    """

    id: str
    kind: str
    rank: int | None = None
    reason: str = ""
    step: int | None = None
    on_alert: bool = False


class BatchResult(msgspec.Struct, frozen=True, tag="batch_result", kw_only=True):
    """Answer to a `Batch`."""

    welcome: Welcome
    acks: tuple[Ack, ...] = ()
    problems: tuple[Problem, ...] = ()
    commands: tuple[Command, ...] = ()


ClientMessage = Hello | Records | Status | Batch
ServerMessage = Welcome | Ack | Problem | Command | BatchResult

_encoder = msgspec.msgpack.Encoder()
_record_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(
    ScalarSchema | LayerSchema | Frame | Event | Detail
)
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
    Hello | Records | Status | Batch
)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(
    Welcome | Ack | Problem | Command | BatchResult
)


class WireError(ValueError):
    """Bytes that are not a valid message or record of this protocol."""


def encode(value: Record | ClientMessage | ServerMessage) -> bytes:
    """Encode one record or message."""
    return _encoder.encode(value)


def decode_record(data: bytes) -> Record:
    """Decode one record; raises `WireError`."""
    try:
        return _record_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a valid record: {error}") from error


def decode_client_message(data: bytes) -> ClientMessage:
    """Decode a message that an agent sent; raises `WireError`."""
    try:
        return _client_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a valid agent message: {error}") from error


def decode_server_message(data: bytes) -> ServerMessage:
    """Decode a message that a server sent; raises `WireError`."""
    try:
        return _server_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a valid server message: {error}") from error
