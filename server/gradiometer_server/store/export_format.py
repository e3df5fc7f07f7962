"""How an exported run looks on disk: numbers that come back bit for bit, one line or row at a time. No database.

Shape letters: N points, B windows, W width of a series, L layers.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from gradiometer import wire
from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.folded import Layout
from gradiometer_server.domain.series import Buckets, Series

_CANONICAL_NAN: Final = 0x7FF8000000000000
_WINDOW_ARRAYS: Final = ("mean", "min", "max", "num_finite", "num_nan", "num_pos_inf", "num_neg_inf")

README: Final = """# A run exported from Gradiometer

* `manifest.json`: written last; `complete` is true if everything is here, `counts` says how much
* `run.json`: what describes the run, its sources (one for each rank and launch), its layouts (layers in order) and
  definitions of metrics
* `points.jsonl` or `points.csv`: every value. In JSON Lines each line holds some steps of one series; `values` has one number
  per step, or for `kind` "layer" one list per step with a number for each layer of the layout `layout_id` in `run.json`.
  In CSV each row holds one value. The metric `_time` is the Unix time of each step. `attempt` counts launches from 1;
  `rank` is null (empty) for values merged over ranks.
* `windows.jsonl` or `windows.csv`: what is left of points that were dropped to save space: windows of `width` steps
* `alerts.jsonl`, `dumps.jsonl`, `details.jsonl`: alerts; where flight recorders saved steps; statistics per layer and histograms
  of single ranks around trouble
* `unfolded.jsonl`: records that the server had received but not yet worked in; they may also be in the points

A file that would be empty is not there. Floats are written so that they read back exactly (Python's `repr`, at most 17 digits).
Those that are not finite are `NaN`, `Infinity` and `-Infinity`: strings in JSON. A NaN other than the usual one carries
its 64 bits: `NaN:7ff8000000000001`. `null` in JSON and an empty field in CSV mean that there is no value.
"""


def number(value: float) -> float | str:
    """A float as JSON can carry it, no bit lost."""
    if value == value and abs(value) != float("inf"):
        return value
    if value != value:
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        return "NaN" if bits == _CANONICAL_NAN else f"NaN:{bits:016x}"
    return "Infinity" if value > 0 else "-Infinity"


def numbers(values: NDArray[np.float64]) -> list[Any]:
    """Floats of any shape as nested lists; None: absent."""
    flat = np.ascontiguousarray(values, np.float64).reshape(-1)
    found: list[Any] = flat.tolist()
    odd = np.flatnonzero(~np.isfinite(flat))
    if odd.size:
        bits, absent = flat.view(np.uint64), is_absent(flat)
        for at in odd.tolist():
            # From the bits: a NaN that went through Python's floats is still itself, but nobody promises it.
            exact = struct.unpack("<d", struct.pack("<Q", int(bits[at])))[0]
            found[at] = None if absent[at] else number(exact)
    nested: list[Any] = np.array(found, dtype=object).reshape(values.shape).tolist()
    return nested


def plain(value: Any) -> Any:
    """A dataclass, Struct or any other value as plain data that `json_line` can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return numbers(value) if value.dtype.kind == "f" else value.tolist()
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return number(value)
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def json_line(value: Any) -> str:
    """One line of strict JSON."""
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n"


def record_of(
    record: wire.Record, schemas: Mapping[int, wire.ScalarSchema | wire.LayerSchema]
) -> Mapping[str, Any]:
    """A record of the log as plain data, with the names of what it holds."""
    if isinstance(record, wire.Event):
        return {
            "type": "event", "kind": record.kind, "time": record.time, "step": record.step,
            "attributes": record.attributes,
        }  # fmt: skip
    if isinstance(record, (wire.ScalarSchema, wire.LayerSchema)):
        return {"type": "schema", "schema_id": record.schema_id, **_columns(record)}
    values = np.frombuffer(record.values, "<u4" if record.values and _is_histogram(record) else "<f8")
    rows = values.reshape(len(record.steps), -1)
    kind = "frame" if isinstance(record, wire.Frame) else record.kind
    return {
        "type": kind, "schema_id": record.schema_id, **_columns(schemas.get(record.schema_id)),
        "steps": record.steps, "times": record.times, "values": rows,
    }  # fmt: skip


def _is_histogram(record: wire.Frame | wire.Detail) -> bool:
    return isinstance(record, wire.Detail) and record.kind == "histogram"


def _columns(schema: wire.ScalarSchema | wire.LayerSchema | None) -> Mapping[str, Any]:
    if schema is None:
        return {}
    if isinstance(schema, wire.ScalarSchema):
        return {"columns": [column.name for column in schema.columns]}
    return {"layers": [layer.name for layer in schema.layers], "statistics": schema.statistics}


class Tables(Protocol):
    """Files of points and windows, opened when the first of them comes; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def points(
        self, one: Series, layout: Layout | None, steps_N: NDArray[np.int64], values_NW: NDArray[np.float64]
    ) -> None:
        """Some steps of a series."""
        ...

    def windows(self, one: Series, layout: Layout | None, windows: Buckets) -> None:
        """What is left of some steps of a series."""
        ...


class _Files:
    """Text files of one folder, closed together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.close()

    def _file(self, name: str) -> tuple[Any, bool]:
        """The file, and whether it is new."""
        is_new = name not in self._open
        if is_new:
            path = self._folder / name
            self._open[name] = self._stack.enter_context(path.open("w", encoding="utf-8", newline=""))
        return self._open[name], is_new


class JsonTables(_Files):
    """Points as JSON Lines: one line for each stored block."""

    def points(
        self, one: Series, layout: Layout | None, steps_N: NDArray[np.int64], values_NW: NDArray[np.float64]
    ) -> None:
        """See `Tables`."""
        values = values_NW[:, 0] if layout is None else values_NW
        self._line("points.jsonl", {**_name(one), "steps": steps_N, "values": numbers(values)})

    def windows(self, one: Series, layout: Layout | None, windows: Buckets) -> None:
        """See `Tables`."""
        arrays = {name: getattr(windows, f"{name}_BW") for name in _WINDOW_ARRAYS}
        if layout is None:
            arrays = {name: values_BW[:, 0] for name, values_BW in arrays.items()}
        line = {**_name(one), "width": windows.width, "first_steps": windows.first_step_B, **arrays}
        self._line("windows.jsonl", line)

    def _line(self, name: str, line: Mapping[str, Any]) -> None:
        self._file(name)[0].write(json_line(line))


def _name(one: Series) -> dict[str, Any]:
    return {
        "metric": one.key, "attempt": one.attempt, "rank": one.rank, "kind": one.kind, "layout_id": one.layout_id,
    }  # fmt: skip


class CsvTables(_Files):
    """Points as CSV: one row for each value."""

    def points(
        self, one: Series, layout: Layout | None, steps_N: NDArray[np.int64], values_NW: NDArray[np.float64]
    ) -> None:
        """See `Tables`."""
        writer = self._writer("points.csv", ("metric", "attempt", "rank", "layer", "step", "value"))
        for column, layer in enumerate(_layers(layout)):
            head = (one.key, one.attempt, one.rank, layer)
            values = numbers(values_NW[:, column])
            # The csv module writes floats with repr, which reads back exactly, and None as an empty field.
            writer.writerows(
                (*head, step, value) for step, value in zip(steps_N.tolist(), values, strict=True)
            )

    def windows(self, one: Series, layout: Layout | None, windows: Buckets) -> None:
        """See `Tables`."""
        names = ("metric", "attempt", "rank", "layer", "first_step", "width", *_WINDOW_ARRAYS)
        writer = self._writer("windows.csv", names)
        for column, layer in enumerate(_layers(layout)):
            arrays = [getattr(windows, f"{name}_BW")[:, column] for name in _WINDOW_ARRAYS]
            columns = [numbers(one) if one.dtype.kind == "f" else one.tolist() for one in arrays]
            for step, *cells in zip(windows.first_step_B.tolist(), *columns, strict=True):
                head = (one.key, one.attempt, one.rank, layer, step, windows.width)
                writer.writerow((*head, *cells))

    def _writer(self, name: str, header: tuple[str, ...]) -> Any:
        file, is_new = self._file(name)
        writer = csv.writer(file)
        if is_new:
            writer.writerow(header)
        return writer


def _layers(layout: Layout | None) -> tuple[str | None, ...]:
    return (None,) if layout is None else layout.names
