"""Reads back what the agent wrote to a spool, as numbers by metric and step."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from gradiometer import wire
from gradiometer.spool_reader import SpoolReader


@dataclass
class Recorded:
    """Everything one source wrote.

    Attributes:
        points: metric -> step -> value; the last one wins.
        layers: layer name -> step -> its row of statistics.
        declared: layer name -> its declaration.
        events: in order.
        details: in order.
        stream: in order, ("scalars" | "layers", step) for each row and (event kind, step) for each event.
    """

    points: dict[str, dict[int, float]] = field(default_factory=dict)
    layers: dict[str, dict[int, tuple[float, ...]]] = field(default_factory=dict)
    declared: dict[str, wire.Layer] = field(default_factory=dict)
    events: list[wire.Event] = field(default_factory=list)
    details: list[wire.Detail] = field(default_factory=list)
    stream: list[tuple[str, int | None]] = field(default_factory=list)
    num_schemas: int = 0

    def of_kind(self, kind: str) -> list[wire.Event]:
        return [event for event in self.events if event.kind == kind]

    def unavailable(self) -> dict[str, str]:
        return {
            event.attributes["metric"]: event.attributes["reason"] for event in self.of_kind("unavailable")
        }


def recorded(directory: Path) -> Recorded:
    """All records of a rank's folder."""
    out = Recorded()
    schemas: dict[int, wire.ScalarSchema | wire.LayerSchema] = {}
    reader = SpoolReader(directory)
    for _, data in reader.records():
        record = wire.decode_record(data)
        if isinstance(record, wire.Event):
            out.events.append(record)
            out.stream.append((record.kind, record.step))
        elif isinstance(record, wire.Detail):
            out.details.append(record)
        elif isinstance(record, wire.Frame):
            _add_frame(out, schemas[record.schema_id], record)
        else:
            schemas[record.schema_id] = record
            out.num_schemas += 1
            if isinstance(record, wire.LayerSchema):
                out.declared.update({layer.name: layer for layer in record.layers})
    reader.close()
    return out


def _add_frame(out: Recorded, schema: wire.ScalarSchema | wire.LayerSchema, frame: wire.Frame) -> None:
    is_layers = isinstance(schema, wire.LayerSchema)
    width = len(schema.layers) * len(schema.statistics) if is_layers else len(schema.columns)
    assert len(frame.values) == 8 * width * len(frame.steps)
    assert len(frame.times) == len(frame.steps)
    for index, step in enumerate(frame.steps):
        row = struct.unpack_from(f"<{width}d", frame.values, 8 * width * index)
        out.stream.append(("layers" if is_layers else "scalars", step))
        if is_layers:
            size = len(schema.statistics)
            for place, layer in enumerate(schema.layers):
                out.layers.setdefault(layer.name, {})[step] = row[place * size : (place + 1) * size]
        else:
            for column, value in zip(schema.columns, row, strict=True):
                out.points.setdefault(column.name, {})[step] = value
