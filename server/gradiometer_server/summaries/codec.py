"""Lossless bytes for arrays of values and steps: byte planes and zstd, with a checksum.

A block starts with two bytes, the codec's version and the item type, so that a later codec can stand beside this one.
Then follows one zstd frame (level 1, checksum) of the planes: first byte of every item, second byte of every item, ...
The planes put exponents beside exponents, which is what zstd finds; measurements: docs/decisions.

Shape letters: N points, W width of a series.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from gradiometer_server.errors import GradiometerError

CODEC_VERSION: Final = 1
_LEVEL: Final = 1
_TYPES: Final[dict[int, str]] = {1: "<f4", 2: "<f8", 3: "<i8"}
_CODES: Final[dict[str, int]] = {"<f4": 1, "<f8": 2, "<i8": 3}
_PLAIN: Final = 0
"""Item type of bytes that are compressed as they are, without planes."""
_MAX_PLAIN_BYTES: Final = 64 * 1024 * 1024


class CorruptData(GradiometerError):
    """Stored bytes that no longer decode to what was written."""

    code = "corrupt_data"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"stored data is damaged: {reason}.",
            remedy="Run `gradiometer db check` to find every damaged block; restore it from a backup.",
        )


class _Zstd(threading.local):
    """One pair of contexts a thread: zstandard's are not thread-safe and let go of the GIL while they work.

    A shared pair gave "Data corruption detected" to readers within seconds and crashed the interpreter under
    eight threads; a shared compressor could also write rubbish just before its source frames are deleted.
    """

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def pack(array: NDArray[Any]) -> bytes:
    """Pack a float32, float64 or int64 array of any shape; the shape itself is not stored."""
    array = np.ascontiguousarray(array)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    planes_KN = little.reshape(-1).view(np.uint8).reshape(-1, little.itemsize).T
    head = bytes((CODEC_VERSION, _CODES[little.dtype.str]))
    return head + _zstd.compressor.compress(planes_KN.tobytes())


def unpack(data: bytes, count: int) -> NDArray[Any]:
    """Unpack `count` items; the dtype is the one that was packed.

    Raises:
        CorruptData: an unknown version, a failed checksum, or another number of items than `count`.
    """
    if len(data) < 2 or data[0] != CODEC_VERSION or data[1] not in _TYPES:
        raise CorruptData(
            f"a block starts with {data[:2].hex() or 'nothing'}, which no codec of this version writes"
        )
    dtype = np.dtype(_TYPES[data[1]])
    planes_KN = np.frombuffer(_decompress(data[2:], count * dtype.itemsize), np.uint8).reshape(
        dtype.itemsize, count
    )
    # Strided stores into the result are six times as fast as a transpose and a copy.
    items_NK = np.empty((count, dtype.itemsize), np.uint8)
    for place in range(dtype.itemsize):
        items_NK[:, place] = planes_KN[place]
    return items_NK.reshape(-1).view(dtype)


def pack_bytes(data: bytes) -> bytes:
    """Compress bytes without planes, for records of mixed types."""
    return bytes((CODEC_VERSION, _PLAIN)) + _zstd.compressor.compress(data)


def unpack_bytes(data: bytes) -> bytes:
    """Inverse of `pack_bytes`. Raises `CorruptData`."""
    if len(data) < 2 or data[0] != CODEC_VERSION or data[1] != _PLAIN:
        raise CorruptData(
            f"a record starts with {data[:2].hex() or 'nothing'}, which no codec of this version writes"
        )
    return _decompress(data[2:], None)


def _decompress(frame: bytes, expected_bytes: int | None) -> bytes:
    # The size is checked first: a damaged header must not make the process allocate what it claims.
    try:
        size = zstandard.frame_content_size(frame)
        if size < 0 or size != (min(size, _MAX_PLAIN_BYTES) if expected_bytes is None else expected_bytes):
            raise CorruptData(f"a block holds {size} bytes where {expected_bytes or 'fewer'} were expected")
        return bytes(_zstd.decompressor.decompress(frame))
    except zstandard.ZstdError as error:
        raise CorruptData(str(error)) from error


def narrow(values: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """`values` as float32 if every float64 is exactly a float32, bit for bit; else float64.

    NaN payloads count: one that float32 cannot hold keeps the block in float64. torch's scalars are float32, so
    most blocks halve.
    """
    if values.dtype == np.float32:
        return values
    wide = np.ascontiguousarray(values, dtype=np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        small = wide.astype(np.float32)
        back = small.astype(np.float64)
    same = np.array_equal(back.view(np.uint64), wide.view(np.uint64))
    return small if same else wide


def encode_values(values_NW: NDArray[np.floating[Any]]) -> bytes:
    """Pack values, as float32 where that loses nothing (see `narrow`)."""
    return pack(narrow(values_NW))


def decode_values(data: bytes, count: int, width: int) -> NDArray[np.float64]:
    """The float64 values (N, W) that `encode_values` packed. Raises `CorruptData`."""
    flat = unpack(data, count * width)
    if flat.dtype.kind != "f":
        raise CorruptData("a block of values holds another type")
    with np.errstate(invalid="ignore"):
        return flat.astype(np.float64, copy=False).reshape(count, width)


def encode_steps(steps_N: NDArray[np.int64]) -> tuple[int, bytes | None]:
    """(stride, None) when the strictly rising steps are evenly spaced, which costs nothing; else (0, packed gaps)."""
    if len(steps_N) == 1:
        return 1, None
    gaps = np.diff(steps_N)
    if (gaps == gaps[0]).all():
        return int(gaps[0]), None
    return 0, pack(gaps)


def decode_steps(
    first: int, stride: int, count: int, data: bytes | None, *, last: int | None = None
) -> NDArray[np.int64]:
    """The steps (N,) that `encode_steps` packed, which must end at `last` if it is known. Raises `CorruptData`.

    Evenly spaced steps have no checksum: their last one is what a damaged row is known by.
    """
    steps_N = _steps(first, stride, count, data)
    if last is not None and int(steps_N[-1]) != last:
        raise CorruptData(f"its steps end at {int(steps_N[-1])}, but its row says {last}")
    return steps_N


def _steps(first: int, stride: int, count: int, data: bytes | None) -> NDArray[np.int64]:
    if count < 1:
        raise CorruptData(f"a block of {count} points")
    if stride > 0:
        return first + stride * np.arange(count, dtype=np.int64)
    if data is None:
        raise CorruptData("a block with uneven steps lacks them")
    gaps = unpack(data, count - 1)
    if gaps.dtype != np.int64:
        raise CorruptData("a block of steps holds another type")
    return first + np.concatenate([np.zeros(1, np.int64), np.cumsum(gaps)])
