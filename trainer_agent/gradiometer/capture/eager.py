"""Partial statistics of gradients in plain torch operations: the backend that runs everywhere.

On the CPU some obvious reductions cost 5 to 20 times the L2 norm (inf-norm, isfinite, std, `t == 0`), so the recipe
is norm, aminmax, sum and count_nonzero; the exact float64 path is taken only for a gradient whose norm says that
float32 was not enough. On other devices nothing branches on a value, because that would be a sync.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from gradiometer.capture import readback
from gradiometer.capture.readback import KnownReadback, Readback
from gradiometer.capture.statistics import (
    COUNT,
    MAX,
    MIN,
    NUM_NONFINITE,
    NUM_ZEROS,
    SUM,
    SUM_SQUARES,
    WIDTH,
    Floats,
    exact,
    with_implicit_zeros,
)

_ROW_ELEMENTS: Final = 4096
_SMALLEST_RMS: Final = 1e-18
"""Below this root mean square the squares get near float32's smallest normal number, 1.2e-38."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, in any order; a copy only for a tensor with holes."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        # channels_last and transposed gradients: dense memory in another order, which no statistic depends on.
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


# Hot path: training thread, once per optimizer step.
def read_cpu(gradients: list[torch.Tensor]) -> Readback:
    """Statistics of non-empty dense gradients on the CPU; a table of shape (len(gradients), 7)."""
    flats = [_widened(flat(gradient)) for gradient in gradients]
    table = np.empty((len(flats), WIDTH))
    counts = np.array([values.numel() for values in flats], dtype=np.float64)
    table[:, COUNT] = counts
    table[:, SUM] = _stacked([values.sum() for values in flats])
    extremes = [torch.aminmax(values) for values in flats]
    table[:, MIN] = _stacked([low for low, _ in extremes])
    table[:, MAX] = _stacked([high for _, high in extremes])
    table[:, NUM_ZEROS] = counts - _stacked([torch.count_nonzero(values) for values in flats])
    table[:, SUM_SQUARES] = _sums_of_squares(flats)
    table[:, NUM_NONFINITE] = 0.0
    for index in np.flatnonzero(_undecided(table)):
        table[index] = exact(flats[index].to(torch.float64).numpy())
    return KnownReadback(table)


def _widened(values: torch.Tensor) -> torch.Tensor:
    # Half-precision reductions are slower on a CPU than the conversion, and overflow at 65504.
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _stacked(scalars: list[torch.Tensor]) -> Floats:
    if any(scalar.dtype != scalars[0].dtype for scalar in scalars):
        scalars = [scalar.to(torch.float64) for scalar in scalars]
    stacked: Floats = torch.stack(scalars).numpy()
    return stacked


def _sums_of_squares(flats: list[torch.Tensor]) -> Floats:
    """Norms of small gradients in one foreach call, of large ones by rows.

    torch adds all squares of a float32 tensor in a few float32 lanes, which is off by 2e-4 at 4 million elements.
    Rows of 4096 folded in float64 are good to 1e-6 (1e-5 if all elements are equal) and cost a tenth more.
    """
    squares = np.zeros(len(flats))
    small = [index for index, values in enumerate(flats) if values.numel() <= 2 * _ROW_ELEMENTS]
    norms = torch._foreach_norm([flats[index] for index in small], 2) if small else []
    for index, norm in zip(small, _stacked(list(norms)) if small else (), strict=True):
        squares[index] = float(norm) ** 2
    for index in set(range(len(flats))).difference(small):
        squares[index] = _sum_of_squares_by_rows(flats[index])
    return squares


def _sum_of_squares_by_rows(values: torch.Tensor) -> float:
    num_rows = values.numel() // _ROW_ELEMENTS
    rows = values[: num_rows * _ROW_ELEMENTS].view(num_rows, _ROW_ELEMENTS)
    norms = torch.linalg.vector_norm(rows, dim=1).to(torch.float64).numpy()
    rest = torch.linalg.vector_norm(values[num_rows * _ROW_ELEMENTS :]).to(torch.float64).numpy()
    return float(np.dot(norms, norms)) + float(rest) ** 2


def _undecided(table: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows for which float32 was not enough: something overflowed or is not finite, or squares underflowed."""
    tiny = table[:, SUM_SQUARES] < _SMALLEST_RMS**2 * table[:, COUNT]
    not_all_zero = table[:, NUM_ZEROS] < table[:, COUNT]
    finite = np.isfinite(table[:, SUM_SQUARES]) & np.isfinite(table[:, SUM])
    unclear: np.ndarray[tuple[int], np.dtype[np.bool_]] = ~finite | (tiny & not_all_zero)
    return unclear


# Hot path: training thread, once per optimizer step. Must not read a value back: no item, no branch on a tensor.
def read_device(gradients: list[torch.Tensor]) -> Readback:
    """Statistics of non-empty dense gradients of one device and dtype; a table of shape (len(gradients), 7)."""
    flats = [flat(gradient) for gradient in gradients]
    wide = readback.widest_dtype(flats[0].device)
    narrow = torch.float64 if flats[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(flats, 2, dtype=wide)
    extremes = [torch.aminmax(values) for values in flats]
    columns = [
        torch.stack([values.sum(dtype=narrow) for values in flats]),
        torch.stack(list(norms)),
        torch.stack([low for low, _ in extremes]),
        torch.stack([high for _, high in extremes]),
        torch.stack([torch.count_nonzero(values) for values in flats]),
        # x - x is 0 for a finite x and NaN, which is not zero, for the others.
        torch.stack([torch.count_nonzero(values - values) for values in flats]),
    ]
    packed = torch.stack([column.to(wide) for column in columns])
    return _DeviceTable(readback.start(packed), [values.numel() for values in flats])


class _DeviceTable:
    """Lays out what `read_device` packed."""

    __slots__ = ("_counts", "_packed")

    def __init__(self, packed: Readback, counts: list[int]) -> None:
        self._packed = packed
        self._counts = counts

    def values(self) -> Floats:
        """Table of shape (gradients, 7); agent thread only."""
        total, norm, low, high, num_nonzero, num_nonfinite = self._packed.values()
        table = np.empty((len(self._counts), WIDTH))
        table[:, COUNT] = self._counts
        table[:, SUM] = total
        with np.errstate(all="ignore"):
            table[:, SUM_SQUARES] = np.square(norm)
        table[:, MIN] = low
        table[:, MAX] = high
        table[:, NUM_ZEROS] = table[:, COUNT] - num_nonzero
        table[:, NUM_NONFINITE] = num_nonfinite
        return table


def read_sparse(gradient: torch.Tensor) -> Readback:
    """Statistics of one sparse COO gradient on the CPU, its implicit zeros included; shape (1, 7)."""
    stored = gradient.coalesce().values()
    row = exact(stored.to(torch.float64).numpy())
    return KnownReadback(with_implicit_zeros(row, math.prod(gradient.shape))[None, :])
