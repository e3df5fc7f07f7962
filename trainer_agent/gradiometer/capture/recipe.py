"""Partial statistics of gradients on the CPU in torch and numpy operations, for machines without the native kernel.

Some obvious reductions cost 5 to 20 times the L2 norm on a CPU (inf-norm, isfinite, std, torch's `t == 0`), so the
recipe is sum, norm, aminmax and numpy's count of zeros. Large gradients are walked in blocks: a block stays in the
cache for its reductions, and half precision is widened block by block. The exact float64 path is taken only for a
block whose norm says that float32 was not enough.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from gradiometer.capture import statistics
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
)

BLOCK_ELEMENTS: Final = 256 * 1024
"""1 MiB of float32: smaller blocks pay more for calls, larger ones more for memory (measured: 4.6 times the floor of
reading everything once, 5.2 with a quarter, 6.2 without blocks and with torch's count of zeros)."""
_ROW_ELEMENTS: Final = 4096
_SMALLEST_MEAN_SQUARE: Final = 1e-36
"""Below, the squares get near float32's smallest normal number, 1.2e-38."""


# Hot path: training thread, once per optimizer step. No item, no branch on a tensor.
def partials(flats: list[torch.Tensor]) -> Floats:
    """Rows as of `statistics.exact`, of non-empty one-dimensional tensors; shape (len(flats), 7)."""
    starts, blocks = _cut(flats)
    sums, extremes, num_zeros = [], [], []
    squares = _Squares(len(blocks))
    for index, block in enumerate(blocks):
        # All reductions of one block before the next block, so that memory is read once.
        values = widened(block)
        sums.append(values.sum())
        squares.add(index, values)
        extremes.append(torch.aminmax(values))
        num_zeros.append(np.count_nonzero(values.detach().numpy() == 0))
    table = np.zeros((len(blocks), WIDTH))
    table[:, COUNT] = [block.numel() for block in blocks]
    table[:, SUM] = _stacked(sums)
    table[:, SUM_SQUARES] = squares.folded()
    table[:, MIN] = _stacked([low for low, _ in extremes])
    table[:, MAX] = _stacked([high for _, high in extremes])
    table[:, NUM_ZEROS] = num_zeros
    num_nonzero = table[:, COUNT] - table[:, NUM_ZEROS]
    is_enough = _is_enough(table[:, SUM_SQUARES], num_nonzero) & np.isfinite(table[:, SUM])
    for unclear in np.flatnonzero(~is_enough):
        table[unclear] = statistics.exact(_as_float64(blocks[unclear]))
    return _per_gradient(table, starts)


# Hot path: as above.
def norms(flats: list[torch.Tensor]) -> Floats:
    """Rows of count, sum_squares, num_nonfinite (0 where sum_squares is finite); shape (len(flats), 3)."""
    starts, blocks = _cut(flats)
    squares = _Squares(len(blocks))
    for index, block in enumerate(blocks):
        squares.add(index, widened(block))
    table = np.zeros((len(blocks), 3))
    table[:, 0] = [block.numel() for block in blocks]
    table[:, 1] = squares.folded()
    for unclear in np.flatnonzero(~_is_enough(table[:, 1], table[:, 0])):
        # Rows of an embedding that no token needed are zero, and are dear to convert.
        if table[unclear, 1] != 0.0 or bool(np.any(widened(blocks[unclear]).detach().numpy())):
            table[unclear, 1:] = _exact_norm(blocks[unclear])
    folded: Floats = np.add.reduceat(table, starts, axis=0)
    return folded


def _exact_norm(block: torch.Tensor) -> tuple[float, float]:
    row = statistics.exact(_as_float64(block))
    is_finite = math.isfinite(row[SUM_SQUARES])
    return float(row[SUM_SQUARES]), 0.0 if is_finite else float(row[NUM_NONFINITE])


def widened(values: torch.Tensor) -> torch.Tensor:
    """Float32 of half precision, whose reductions are slower on a CPU than the conversion and overflow at 65504."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def cut(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Blocks of a one-dimensional tensor."""
    return (values,) if values.numel() <= BLOCK_ELEMENTS else torch.split(values, BLOCK_ELEMENTS)


def _cut(flats: list[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """Blocks of all gradients, and the index of the first block of each."""
    starts: list[int] = []
    blocks: list[torch.Tensor] = []
    for gradient in flats:
        starts.append(len(blocks))
        blocks.extend(cut(gradient))
    return starts, blocks


class _Squares:
    """Sums of squares of blocks: of small ones in one foreach call, of large ones by rows.

    torch adds all squares of a float32 tensor in a few float32 lanes, which is off by 2e-4 at 4 million elements.
    Rows of 4096 folded in float64 are good to 1e-6 (1e-5 if all elements are equal) and cost a tenth more.
    """

    def __init__(self, num_blocks: int) -> None:
        self._sums = np.zeros(num_blocks)
        self._small: list[tuple[int, torch.Tensor]] = []
        self._rows: list[tuple[int, torch.Tensor]] = []

    def add(self, index: int, values: torch.Tensor) -> None:
        """Another block."""
        if values.numel() <= 2 * _ROW_ELEMENTS:
            self._small.append((index, values))
            return
        num_whole = values.numel() // _ROW_ELEMENTS * _ROW_ELEMENTS
        rows = values[:num_whole].view(-1, _ROW_ELEMENTS)
        self._rows.append((index, torch.linalg.vector_norm(rows, dim=1)))
        if num_whole < values.numel():
            self._small.append((index, values[num_whole:]))

    def folded(self) -> Floats:
        """Sums of squares, one per block."""
        with np.errstate(all="ignore"):
            if self._small:
                norms = _stacked(list(torch._foreach_norm([values for _, values in self._small], 2)))
                np.add.at(self._sums, [index for index, _ in self._small], np.square(norms, dtype=np.float64))
            for index, rows in self._rows:
                wide = rows.detach().numpy().astype(np.float64)
                self._sums[index] += np.dot(wide, wide)
        return self._sums


def _stacked(scalars: list[torch.Tensor]) -> Floats:
    if any(scalar.dtype != scalars[0].dtype for scalar in scalars):
        scalars = [scalar.to(torch.float64) for scalar in scalars]
    stacked: Floats = torch.stack(scalars).detach().numpy()
    return stacked


def _as_float64(block: torch.Tensor) -> Floats:
    exact: Floats = block.detach().to(torch.float64).numpy()
    return exact


def _is_enough(sum_squares: Floats, num_nonzero: Floats) -> npt.NDArray[np.bool_]:
    """Blocks for which float32 was enough: nothing overflowed or is not finite, and no squares underflowed."""
    clear: npt.NDArray[np.bool_] = sum_squares >= _SMALLEST_MEAN_SQUARE * num_nonzero
    return clear & np.isfinite(sum_squares)


def _per_gradient(table: Floats, starts: list[int]) -> Floats:
    # add hands on a NaN and infinities of either sign, minimum and maximum hand on a NaN.
    with np.errstate(all="ignore"):
        folded: Floats = np.add.reduceat(table, starts, axis=0)
    folded[:, MIN] = np.minimum.reduceat(table[:, MIN], starts)
    folded[:, MAX] = np.maximum.reduceat(table[:, MAX], starts)
    return folded
