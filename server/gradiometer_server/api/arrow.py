"""Answers as Arrow IPC streams, for whoever says `Accept: application/vnd.apache.arrow.stream`.

A NaN in an Arrow column is a NaN; null means absent. What is not a column (names, widths, errors) is JSON in the schema's
metadata, under the key `gradiometer`. pyarrow is an optional extra of the server.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response, StreamingResponse

from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.jsonable import dumps
from gradiometer_server.errors import NotAcceptable

MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"
_METADATA_KEY: Final = "gradiometer"
HEADERS: Final = {"Cache-Control": "no-store", "Vary": "Accept"}

Columns = Mapping[str, Any]
"""Name -> Arrow array; all of one length."""


def is_wanted(accept: str | None) -> bool:
    """Whether a request asks for Arrow; anything else is answered with JSON.

    Raises:
        NotAcceptable: it does, but pyarrow is not installed.
    """
    kinds = [part.strip().replace(" ", "").lower() for part in (accept or "").split(",")]
    if not any(kind.split(";")[0] == MEDIA_TYPE and not kind.endswith(";q=0") for kind in kinds):
        return False
    _pyarrow()
    return True


def _pyarrow() -> Any:
    # Imported on the first use: it takes a third of a second and many megabytes that most servers never need.
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise NotAcceptable(
            "this server cannot answer with Arrow, because pyarrow is not installed.",
            remedy="Install it beside the server with pip install 'gradiometer[arrow]', or accept application/json.",
        ) from error


def reals(values_N: NDArray[np.float64], *, nan_is_null: bool = False) -> Any:
    """A float64 column; absence marks are null, and so is every NaN if that says there was nothing to compute from."""
    flat = np.ascontiguousarray(values_N, np.float64).reshape(-1)
    return _pyarrow().array(flat, mask=np.isnan(flat) if nan_is_null else is_absent(flat))


def wholes(values_N: NDArray[np.int64], *, negative_is_null: bool = False) -> Any:
    """An int64 column."""
    flat = np.ascontiguousarray(values_N, np.int64)
    return _pyarrow().array(flat, mask=flat < 0 if negative_is_null else None)


def real_lists(values_BL: NDArray[np.float64]) -> Any:
    """A column of lists of L floats, NaN as null."""
    return _pyarrow().FixedSizeListArray.from_arrays(reals(values_BL, nan_is_null=True), values_BL.shape[1])


def whole_lists(values_BL: NDArray[np.int64]) -> Any:
    """A column of lists of L whole numbers."""
    return _pyarrow().FixedSizeListArray.from_arrays(wholes(values_BL.reshape(-1)), values_BL.shape[1])


def stream(about: object, batches: Sequence[Columns], empty: Columns) -> Response:
    """One batch per entry, all with the columns of `empty`; `about` is what the metadata says."""
    sink = io.BytesIO()
    for _ in _write(sink, about, batches, empty):
        pass
    return Response(sink.getvalue(), media_type=MEDIA_TYPE, headers=HEADERS)


def streaming(
    about: object, batches: Iterable[Columns], empty: Columns, headers: Mapping[str, str]
) -> Response:
    """As `stream`, sent while it is made."""

    def parts() -> Iterator[bytes]:
        sink = io.BytesIO()
        for _ in _write(sink, about, batches, empty):
            yield sink.getvalue()
            sink.seek(0)
            sink.truncate()
        yield sink.getvalue()

    return StreamingResponse(parts(), media_type=MEDIA_TYPE, headers={**HEADERS, **headers})


def _write(sink: io.BytesIO, about: object, batches: Iterable[Columns], empty: Columns) -> Iterator[None]:
    arrow = _pyarrow()
    ipc = importlib.import_module("pyarrow.ipc")
    schema = arrow.schema([(name, column.type) for name, column in empty.items()])
    with ipc.new_stream(_Open(sink), schema.with_metadata({_METADATA_KEY: dumps(about)})) as writer:
        for columns in batches:
            writer.write_batch(arrow.record_batch(list(columns.values()), schema=schema))
            yield


class _Open(io.RawIOBase):
    """Hands bytes on to a sink that stays open when the writer closes."""

    def __init__(self, sink: io.BytesIO) -> None:
        self._sink = sink

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._sink.write(bytes(data))
