"""How numbers become JSON, for REST and the live feed alike.

JSON has no NaN: a float that is not finite is one of three strings, and `null` means absent (`domain.absent`), which
is another thing than NaN. Arrays stay arrays until here, because walking 150,000 cells in Python is what would
make a heat map slow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.absent import is_absent

JsonFloat = float | str | None

NAN: Final = "NaN"
POS_INF: Final = "Infinity"
NEG_INF: Final = "-Infinity"

_encoder = msgspec.json.Encoder()


def float_to_json(value: float | None) -> JsonFloat:
    """One number; None stays absent."""
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        return NAN
    return POS_INF if value > 0 else NEG_INF


def floats_to_json(values: NDArray[np.floating[Any]], *, nan_is_null: bool = False) -> list[Any]:
    """Numbers of any shape as nested lists of that shape.

    Args:
        values: float32 or float64; absence marks become null.
        nan_is_null: for values that are NaN only because there was nothing to compute them from.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    out: list[JsonFloat] = flat.tolist()
    odd = np.flatnonzero(~np.isfinite(flat))
    if odd.size:
        absent = is_absent(flat)
        for index in odd.tolist():
            null = absent[index] or (nan_is_null and np.isnan(flat[index]))
            out[index] = None if null else float_to_json(float(flat[index]))
    return _nest(out, values.shape)


def _nest(flat: list[Any], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) <= 1:
        return flat
    width = math.prod(shape[1:])
    return [_nest(flat[row * width : (row + 1) * width], shape[1:]) for row in range(shape[0])]


def json_safe(value: Any) -> Any:
    """Any value that came over the wire or out of the database, with its floats as JSON can carry them."""
    if isinstance(value, float):
        return float_to_json(value)
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_safe(item) for item in value]
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, np.ndarray):
        return floats_to_json(value) if value.dtype.kind == "f" else value.tolist()
    if isinstance(value, np.generic):
        return json_safe(value.item())
    return str(value)


def dumps(value: Any) -> bytes:
    """JSON of plain values whose floats went through this module (a bare NaN would silently become null)."""
    return _encoder.encode(value)
