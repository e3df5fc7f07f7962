"""Is this hello, this record, well formed and in range? Pure checks that answer with what is wrong and what to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gradiometer import wire
from gradiometer.wire import limits

MAX_SOURCES: Final = 1024
"""Most ranks of one node."""
MAX_WORLD_SIZE: Final = 1_000_000
MAX_ATTEMPT: Final = 2**53 - 1
MAX_DIMENSIONS: Final = 64
"""Most dimensions of a layer or of its mesh; a product over more of them takes longer with each one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with an input: a stable code, the field and what it holds, and what to do about it."""

    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSchema:
    """What a frame needs of its schema: how many values a step has, and of how many layers (0: of none)."""

    schema_id: int
    width: int
    num_layers: int = 0


def hello_fault(hello: wire.Hello) -> Fault | None:
    """First reason to refuse `hello`, or None."""
    if hello.protocol != wire.PROTOCOL_VERSION:
        older = "agent" if hello.protocol < wire.PROTOCOL_VERSION else "server"
        return Fault(
            code="unknown_protocol",
            message=f"the agent speaks protocol {hello.protocol} (agent {hello.agent_version[:64]!r}), "
            f"this server speaks protocol {wire.PROTOCOL_VERSION}",
            remedy=f"upgrade the {older}: pip install --upgrade gradiometer; the spool is kept until then",
        )
    return _run_fault(hello.run) or _sources_fault(hello.sources)


def _run_fault(run: wire.RunInfo) -> Fault | None:
    """Of what names the run. What only describes it was made to fit before (`cleaning`)."""
    return _label_fault("run.run_id", run.run_id) or _label_fault("run.project", run.project)


def _sources_fault(sources: tuple[wire.SourceInfo, ...]) -> Fault | None:
    if not 1 <= len(sources) <= MAX_SOURCES:
        return _hello("sources", f"names {len(sources)} sources; 1 to {MAX_SOURCES} are allowed")
    pairs = {(source.rank, source.attempt) for source in sources}
    if len(pairs) < len(sources):
        return _hello("sources", "names one rank twice in the same attempt")
    return next((fault for fault in map(_source_fault, sources) if fault is not None), None)


def _source_fault(source: wire.SourceInfo) -> Fault | None:
    where = f"sources[rank {source.rank}]"
    ranges = (
        ("world_size", source.world_size, 1, MAX_WORLD_SIZE),
        ("rank", source.rank, 0, source.world_size - 1),
        ("attempt", source.attempt, 1, MAX_ATTEMPT),
        ("start_step", source.start_step, 0, wire.MAX_STEP),
    )
    for field, value, low, high in ranges:
        if not low <= value <= high:
            return _hello(f"{where}.{field}", f"is {value}; it must be from {low} to {high}")
    if not math.isfinite(source.started_s):
        return _hello(f"{where}.started_s", f"is {source.started_s}, not a time")
    return None


def _hello(field: str, what: str) -> Fault:
    return Fault(
        code="invalid_hello",
        message=f"hello: {field} {what}",
        remedy="correct this value where the run is started (gradiometer.init or the environment), then send again",
    )


def _label_fault(field: str, text: str) -> Fault | None:
    problem = limits.label_problem(text, limits.MAX_ID_CHARS)
    if problem is None:
        return None
    return _hello(field, f"cannot be used: {problem} (1 to {limits.MAX_ID_CHARS} printable characters)")


def record_fault(record: wire.Record, schemas: Mapping[int, KnownSchema]) -> Fault | None:
    """First reason to refuse `record` of a source that declared `schemas`, or None."""
    if isinstance(record, wire.Frame):
        return _frame_fault(record, schemas, f"frame of schema {record.schema_id}")
    if isinstance(record, wire.Detail):
        return _detail_fault(record, schemas)
    if isinstance(record, wire.Event):
        return _event_fault(record)
    return _schema_fault(record, schemas)


def known_schema(record: wire.ScalarSchema | wire.LayerSchema) -> KnownSchema:
    """What later frames need to know of this declaration."""
    if isinstance(record, wire.ScalarSchema):
        return KnownSchema(schema_id=record.schema_id, width=len(record.columns))
    width = len(record.layers) * len(record.statistics)
    return KnownSchema(schema_id=record.schema_id, width=width, num_layers=len(record.layers))


def _schema_fault(
    schema: wire.ScalarSchema | wire.LayerSchema, schemas: Mapping[int, KnownSchema]
) -> Fault | None:
    what = f"schema {schema.schema_id}"
    if not 0 <= schema.schema_id <= wire.MAX_STEP:
        return _bad("invalid_schema", f"{what}: schema_id must be from 0 to {wire.MAX_STEP}", _AGENT_BUG)
    if schema.schema_id in schemas:
        return _bad("repeated_schema", f"{what} is declared a second time in this source", _NEW_ID)
    if len(schemas) >= limits.MAX_SCHEMAS:
        return _bad(
            "too_many_schemas", f"{what}: this source declared {len(schemas)} schemas already", _FEWER
        )
    if isinstance(schema, wire.ScalarSchema):
        return _names_fault(what, "columns", [column.name for column in schema.columns], "metric")
    if not _are_known(schema.statistics):
        return _bad(
            "unknown_statistics",
            f"{what}: statistics {list(schema.statistics)!r:.300} are not a part of {list(wire.STATISTICS)} in this "
            f"order with {list(wire.NORM_STATISTICS)} in it",
            "upgrade the agent or the server so that both have the same version",
        )
    names = [layer.name for layer in schema.layers]
    return _names_fault(what, "layers", names, "layer") or _shapes_fault(what, schema.layers)


def _are_known(statistics: tuple[str, ...]) -> bool:
    """Whether these are known statistics in wire order, with those that every step must have."""
    in_order = tuple(name for name in wire.STATISTICS if name in statistics)
    return statistics == in_order and set(wire.NORM_STATISTICS) <= set(statistics)


def _names_fault(what: str, field: str, names: list[str], kind: str) -> Fault | None:
    if not 1 <= len(names) <= wire.MAX_COLUMNS:
        return _bad(
            "invalid_schema", f"{what}: {len(names)} {field}; 1 to {wire.MAX_COLUMNS} are allowed", _FEWER
        )
    for index, name in enumerate(names):
        problem = wire.name_problem(name)
        if problem is not None:
            return _bad("invalid_name", f"{what}: {field}[{index}] {name[:60]!r}: {problem}", _RENAME)
    if len(set(names)) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        return _bad("duplicate_name", f"{what}: {kind} {twice[:200]!r} appears twice in {field}", _RENAME)
    return None


def _shapes_fault(what: str, layers: tuple[wire.Layer, ...]) -> Fault | None:
    for layer in layers:
        problem = _shape_problem(layer)
        if problem is not None:
            return _bad("invalid_layer", f"{what}: layer {layer.name[:200]!r}: {problem}", _AGENT_BUG)
    return None


def _shape_problem(layer: wire.Layer) -> str | None:
    if max(len(layer.shape), len(layer.shard)) > MAX_DIMENSIONS:
        dimensions = max(len(layer.shape), len(layer.shard))
        return f"shape or shard has {dimensions} dimensions; at most {MAX_DIMENSIONS} are allowed"
    if any(size < 0 for size in layer.shape):
        return f"shape {layer.shape} has a negative size"
    if layer.numel != math.prod(layer.shape) or layer.numel > wire.MAX_STEP:
        return f"numel {layer.numel} is not the product of shape {layer.shape}"
    if layer.num_shards < 1:
        return f"num_shards is {layer.num_shards}; it must be at least 1"
    if any(coordinate < 0 or coordinate >= layer.num_shards for coordinate in layer.shard):
        return f"shard {layer.shard} lies outside its {layer.num_shards} shards"
    if not layer.shard and layer.num_shards > 1:
        return f"num_shards is {layer.num_shards} but no shard coordinates are given"
    return None


def _detail_fault(detail: wire.Detail, schemas: Mapping[int, KnownSchema]) -> Fault | None:
    what = f"{detail.kind} of schema {detail.schema_id}"
    schema = schemas.get(detail.schema_id)
    if schema is not None and not schema.num_layers:
        return _bad("unknown_schema", f"{what}: that schema declares no layers", _DECLARE)
    if len(detail.steps) > wire.MAX_DETAIL_STEPS:
        most = f"{len(detail.steps)} steps; at most {wire.MAX_DETAIL_STEPS} are allowed"
        return _bad("too_many_steps", f"{what}: {most}", _AGENT_BUG)
    if len(detail.reason) > wire.MAX_REASON_CHARS:
        return _bad("invalid_detail", f"{what}: reason has {len(detail.reason)} characters", _AGENT_BUG)
    if detail.trigger_step is not None and not 0 <= detail.trigger_step <= wire.MAX_STEP:
        return _bad("step_out_of_range", f"{what}: trigger_step is {detail.trigger_step}", _STEP)
    if detail.kind == "histogram":
        return _histogram_fault(detail, schema, what)
    return _frame_fault(detail, schemas, what)


def _histogram_fault(detail: wire.Detail, schema: KnownSchema | None, what: str) -> Fault | None:
    if schema is None:
        return _bad("unknown_schema", f"{what}: this source has not declared that schema", _DECLARE)
    if not detail.steps:
        return _rows_fault(detail, what)
    expected = 4 * len(detail.steps) * schema.num_layers * wire.HISTOGRAM_BINS
    if len(detail.values) != expected:
        return _bad(
            "frame_length",
            f"{what}: values has {len(detail.values)} bytes; {len(detail.steps)} steps of {schema.num_layers} layers "
            f"with {wire.HISTOGRAM_BINS} uint32 counts are {expected} bytes",
            _AGENT_BUG,
        )
    return _rows_fault(detail, what)


def _frame_fault(
    frame: wire.Frame | wire.Detail, schemas: Mapping[int, KnownSchema], what: str
) -> Fault | None:
    """# Hot path: once per frame of every rank; must not touch the values themselves."""
    schema = schemas.get(frame.schema_id)
    if schema is None:
        return _bad("unknown_schema", f"{what}: this source has not declared that schema", _DECLARE)
    expected = 8 * len(frame.steps) * schema.width
    if frame.steps and len(frame.values) != expected:
        return _bad(
            "frame_length",
            f"{what}: values has {len(frame.values)} bytes; {len(frame.steps)} steps of {schema.width} float64 "
            f"values are {expected} bytes",
            _AGENT_BUG,
        )
    return _rows_fault(frame, what)


def _rows_fault(frame: wire.Frame | wire.Detail, what: str) -> Fault | None:
    if not frame.steps:
        return _bad("empty_frame", f"{what}: steps is empty", _AGENT_BUG)
    if len(frame.times) != len(frame.steps):
        return _bad(
            "frame_length", f"{what}: {len(frame.times)} times for {len(frame.steps)} steps", _AGENT_BUG
        )
    low, high = min(frame.steps), max(frame.steps)
    if low < 0 or high > wire.MAX_STEP:
        wrong = low if low < 0 else high
        return _bad("step_out_of_range", f"{what}: step {wrong} is not from 0 to {wire.MAX_STEP}", _STEP)
    if not all(map(math.isfinite, frame.times)):
        return _bad("invalid_time", f"{what}: times holds a value that is not finite", _AGENT_BUG)
    return None


def _event_fault(event: wire.Event) -> Fault | None:
    what = f"{event.kind} event"
    if not math.isfinite(event.time):
        return _bad("invalid_time", f"{what}: time is {event.time}", _AGENT_BUG)
    if event.step is not None and not 0 <= event.step <= wire.MAX_STEP:
        return _bad("step_out_of_range", f"{what}: step {event.step} is not from 0 to {wire.MAX_STEP}", _STEP)
    problem = limits.structure_problem(event.attributes)
    if problem is not None:
        return _bad("invalid_event", f"{what}: attributes: {problem}", _PLAIN)
    return _attributes_fault(what, event)


def _attributes_fault(what: str, event: wire.Event) -> Fault | None:
    for name, types in _EVENT_ATTRIBUTES.get(event.kind, {}).items():
        value = event.attributes.get(name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return _bad(
                "invalid_event",
                f"{what}: attribute {name!r} is {value!r:.80}, expected {_expected(types)}",
                _PLAIN,
            )
        low = 0 if event.kind == "dropped" else -wire.MAX_STEP
        if isinstance(value, int) and not low <= value <= wire.MAX_STEP:
            return _bad(
                "invalid_event",
                f"{what}: attribute {name!r} is {value}; it must be from {low} to {wire.MAX_STEP}",
                _AGENT_BUG,
            )
    return None


def status_fault(status: wire.Status) -> Fault | None:
    """First figure of a status that cannot be noted, or None."""
    for source in status.sources:
        if not 0 <= source.dropped_reports <= wire.MAX_STEP:
            what = f"status of rank {source.rank}: dropped_reports is {source.dropped_reports}"
            return _bad("invalid_status", f"{what}; it must be from 0 to {wire.MAX_STEP}", _AGENT_BUG)
    return None


def _expected(types: tuple[type, ...]) -> str:
    return " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in types)


_OPTIONAL_TEXT: Final = (str, type(None))
_EVENT_ATTRIBUTES: Final[Mapping[str, Mapping[str, tuple[type, ...]]]] = {
    "exit": {"code": (int, type(None)), "signal": _OPTIONAL_TEXT, "reason": _OPTIONAL_TEXT},
    "exception": {"type": (str,), "message": _OPTIONAL_TEXT},
    "marker": {"name": (str,)},
    "alert": {"title": (str,), "text": _OPTIONAL_TEXT, "severity": _OPTIONAL_TEXT},
    "unavailable": {"metric": (str,), "reason": (str,)},
    "nonfinite_activation": {"modules": (list,)},
    "dropped": {"reports": (int,), "reason": _OPTIONAL_TEXT},
    "message": {"text": (str,)},
    "environment": {"facts": (dict,)},
    "metric": {"name": (str,), "summary": (str,), "goal": _OPTIONAL_TEXT, "step_metric": _OPTIONAL_TEXT},
    "check": {
        "check": (str,),
        "watch": _OPTIONAL_TEXT,
        "title": (str,),
        "text": (str,),
        "advice": _OPTIONAL_TEXT,
        "severity": (str,),
        "metric": _OPTIONAL_TEXT,
        "count": (int, type(None)),
        "facts": (dict, type(None)),
    },
    "dump": {"path": (str,), "reason": (str,), "host": _OPTIONAL_TEXT, "bytes": (int, type(None))},
}
_AGENT_BUG: Final = "this is a defect of the sender: upgrade the agent, or report it with this message"
_NEW_ID: Final = "declare a changed set of columns under a new schema_id"
_FEWER: Final = "log fewer different metric names; do not put a changing number into a name"
_RENAME: Final = "give every metric and layer its own printable name of at most 500 characters"
_DECLARE: Final = "send the schema record before the first frame that uses it"
_STEP: Final = "log with a step that counts up from 0"
_PLAIN: Final = "use plain text, numbers, lists and dictionaries as the event's description says"


def _bad(code: str, message: str, remedy: str) -> Fault:
    return Fault(code=code, message=message, remedy=remedy)
