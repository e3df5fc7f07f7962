"""The native CPU kernel, loaded through ctypes: statistics of gradients with one read of memory.

`load` gives the kernel, or None where there is no library, it fails its self-test, or `GRADIOMETER_NATIVE=0`; `why_not`
says which. Everything works without it, only slower (`eager.py`). ctypes lets go of the GIL during a call.

Histograms have `NUM_BINS` bins of log2 magnitude, the exponent field of a float32: bin 0 counts |g| < 2**-126 (zeros
too, which `num_zeros` tells apart), bin b in 1..254 counts 2**(b-127) <= |g| < 2**(b-126), bin 255 infinities and NaN.
float64 beyond float32's range goes into bins 0 and 254. Bins of ranks and of gradients add up.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from gradiometer.capture import statistics
from gradiometer.capture.native import build
from gradiometer.capture.statistics import Floats

if TYPE_CHECKING:
    import torch

_log: Final = logging.getLogger(__name__)

VARIABLE: Final = "GRADIOMETER_NATIVE"
ABI: Final = 2
"""Equal to that of the source; a library that was built from another one is not used."""
NUM_BINS: Final = 256
NORM_WIDTH: Final = 3
SAMPLE_EVERY: Final = 16
FASTEST, PORTABLE = 0, 1
FLOAT32, FLOAT64, FLOAT16, BFLOAT16 = range(4)

Counts = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Where the elements of gradients lie.

    Attributes:
        addresses: of the first elements (uint64).
        lengths: elements (int64), contiguous.
        dtypes: `FLOAT32` and so on (int32).
        owners: what keeps the memory alive.
    """

    addresses: array[int]
    lengths: array[int]
    dtypes: array[int]
    owners: Sequence[object]


class Kernel:
    """The functions of the library.

    Args:
        library: loaded already.
        path: `FASTEST`, or `PORTABLE` to do without vector instructions beyond the baseline.
    """

    def __init__(self, library: Any, path: int = FASTEST) -> None:
        self._library = library
        self._path = path

    # Hot path: training thread, once per optimizer step. One call for all gradients; must not copy one.
    def partials(self, table: Table) -> Floats:
        """Rows as of `statistics.exact`; shape (gradients, 7)."""
        rows = np.empty((len(table.lengths), statistics.WIDTH))
        self._library.gradiometer_partials(*_arguments(table), self._path, rows.ctypes.data)
        return rows

    # Hot path: as above.
    def norms(self, table: Table) -> Floats:
        """Rows of count, sum_squares, num_nonfinite (0 where sum_squares is finite); shape (gradients, 3)."""
        rows = np.empty((len(table.lengths), NORM_WIDTH))
        self._library.gradiometer_norms(*_arguments(table), self._path, rows.ctypes.data)
        return rows

    def histograms(self, table: Table, every: int = 1) -> Counts:
        """Bins of log2 magnitude, shape (gradients, 256).

        Args:
            every: count one block of 4096 elements in `every`, beginning with the first.
        """
        bins = np.empty((len(table.lengths), NUM_BINS), dtype=np.uint64)
        self._library.gradiometer_histograms(*_arguments(table), self._path, every, bins.ctypes.data)
        return bins

    def has_nonfinite(self, address: int, length: int, dtype: int) -> bool:
        """Whether one of `length` contiguous elements at `address` is NaN or infinite."""
        return bool(self._library.gradiometer_any_nonfinite(address, length, dtype, self._path))

    def nonfinite_function(self) -> Callable[[int, int, int, int], int]:
        """What `has_nonfinite` calls, for a hot path of many small calls; its last argument is `path`."""
        function: Callable[[int, int, int, int], int] = self._library.gradiometer_any_nonfinite
        return function

    @property
    def path(self) -> int:
        """`FASTEST` or `PORTABLE`."""
        return self._path

    @property
    def uses_avx2(self) -> bool:
        """Whether the functions for AVX2 are in use."""
        return self._path == FASTEST and bool(self._library.gradiometer_uses_avx2())


def _arguments(table: Table) -> tuple[int, int, int, int]:
    addresses, lengths, dtypes = table.addresses, table.lengths, table.dtypes
    return len(lengths), addresses.buffer_info()[0], lengths.buffer_info()[0], dtypes.buffer_info()[0]


# Hot path: training thread, once per optimizer step. About a microsecond per gradient; must not copy a dense one.
def table_of(gradients: list[torch.Tensor], flat: Any) -> Table | None:
    """The table of dense CPU gradients; None if one of them is not plain memory of a type that the kernel knows.

    Args:
        flat: makes a tensor one-dimensional and contiguous.
    """
    import torch

    dtypes = _torch_dtypes()
    codes = [dtypes.get(gradient.dtype, -1) for gradient in gradients]
    # A subclass may hold its values elsewhere, and a tensor with the negative bit holds their negatives.
    if -1 in codes or not _plain_types().issuperset(map(type, gradients)):
        return None
    if any(map(torch.Tensor.is_neg, gradients)):
        return None
    owners = gradients
    if not all(map(torch.Tensor.is_contiguous, gradients)):
        owners = [gradient if gradient.is_contiguous() else flat(gradient) for gradient in gradients]
    return Table(
        addresses=array("Q", list(map(torch.Tensor.data_ptr, owners))),
        lengths=array("q", list(map(torch.Tensor.numel, owners))),
        dtypes=array("i", codes),
        owners=owners,
    )


@functools.cache
def _plain_types() -> frozenset[type]:
    import torch

    return frozenset({torch.Tensor, torch.nn.Parameter})


@functools.cache
def _torch_dtypes() -> dict[torch.dtype, int]:
    import torch

    return {
        torch.float32: FLOAT32,
        torch.float64: FLOAT64,
        torch.float16: FLOAT16,
        torch.bfloat16: BFLOAT16,
    }


def load() -> Kernel | None:
    """The kernel; None if it is not to be had."""
    return _loaded()[0]


def why_not() -> str | None:
    """Why `load` gives None, for people; None if it gives a kernel."""
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[Kernel | None, str | None]:
    found = _load()
    if isinstance(found, str):
        _log.debug("gradiometer: gradients are read with torch, without the native kernel: %s", found)
        return None, found
    return found, None


def _load() -> Kernel | str:
    if os.environ.get(VARIABLE, "1") == "0":
        return f"{VARIABLE}=0"
    if not build.LIBRARY.is_file():
        return "it was not built when this package was; python -m gradiometer.capture.native.build builds it"
    try:
        library = declared(ctypes.CDLL(str(build.LIBRARY)))
    except (OSError, AttributeError) as error:
        return f"the library cannot be loaded: {error}"
    if library.gradiometer_abi() != ABI:
        return "the library is of another version; python -m gradiometer.capture.native.build builds it again"
    kernel = Kernel(library)
    problem = self_test(kernel)
    return kernel if problem is None else problem


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """`library`, its functions' arguments declared.

    Raises:
        AttributeError: it lacks a function.
    """
    table: list[Any] = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
    library.gradiometer_partials.argtypes = [*table, ctypes.c_void_p]
    library.gradiometer_norms.argtypes = [*table, ctypes.c_void_p]
    library.gradiometer_histograms.argtypes = [*table, ctypes.c_int64, ctypes.c_void_p]
    for name in ("partials", "norms", "histograms"):
        getattr(library, f"gradiometer_{name}").restype = None
    library.gradiometer_any_nonfinite.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_int32,
    ]
    for name in ("abi", "uses_avx2"):
        getattr(library, f"gradiometer_{name}").argtypes = []
    for name in ("abi", "uses_avx2", "any_nonfinite"):
        getattr(library, f"gradiometer_{name}").restype = ctypes.c_int32
    return library


def self_test(kernel: Kernel) -> str | None:
    """Compare the kernel with the definition on a few small gradients; what differs, or None."""
    halves = np.array([0.0, -2.0, 6e-8, 65504.0, 1.5] * 20, dtype=np.float16)
    singles = np.concatenate([np.linspace(-3.0, 5.0, 37), [0.0, np.inf, np.nan]]).astype(np.float32)
    brains = np.linspace(-1.0, 2.0, 50, dtype=np.float32).view(np.uint32) >> 16
    cases: list[tuple[int, npt.NDArray[Any], Floats]] = [
        (FLOAT64, np.linspace(-1e200, 1e-200, 33), np.linspace(-1e200, 1e-200, 33)),
        (FLOAT32, singles, singles.astype(np.float64)),
        (FLOAT32, np.full(40, 1e30, dtype=np.float32), np.full(40, np.float64(np.float32(1e30)))),
        (FLOAT16, halves, halves.astype(np.float64)),
        (BFLOAT16, brains.astype(np.uint16), (brains << 16).view(np.float32).astype(np.float64)),
        (FLOAT64, np.array([1.0, np.inf]), np.array([1.0, np.inf])),
        (FLOAT16, np.array([1.0, np.nan], dtype=np.float16), np.array([1.0, np.nan])),
        (BFLOAT16, np.array([0x3F80, 0xFF80], dtype=np.uint16), np.array([1.0, -np.inf])),
    ]
    table = Table(
        addresses=array("Q", [stored.ctypes.data for _, stored, _ in cases]),
        lengths=array("q", [stored.size for _, stored, _ in cases]),
        dtypes=array("i", [code for code, _, _ in cases]),
        owners=cases,
    )
    expected = np.stack([statistics.exact(values) for _, _, values in cases])
    rows, norms = kernel.partials(table), kernel.norms(table)
    if not np.allclose(rows, expected, rtol=2e-6, atol=1e-6, equal_nan=True):
        return "the library failed its self-test: its statistics differ from their definition"
    subset = [statistics.COUNT, statistics.SUM_SQUARES, statistics.NUM_NONFINITE]
    if not np.allclose(norms, expected[:, subset], rtol=2e-6, atol=0.0, equal_nan=True):
        return "the library failed its self-test: its norms differ from their definition"
    if kernel.histograms(table).sum(axis=1).tolist() != list(table.lengths):
        return "the library failed its self-test: its histograms do not count every element"
    found = [
        kernel.has_nonfinite(*place)
        for place in zip(table.addresses, table.lengths, table.dtypes, strict=True)
    ]
    if found != (expected[:, statistics.NUM_NONFINITE] > 0).tolist():
        return "the library failed its self-test: it does not find what is not finite"
    return None
