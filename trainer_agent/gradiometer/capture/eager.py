"""Reads gradients wherever they are: the native kernel or a recipe of torch operations, on the CPU or on a device.

On the CPU the table is complete when a function returns. On other devices nothing branches on a value, because that
would be a sync; the table is on its way to the host.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from gradiometer.capture import native, readback, recipe
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

_DEVICE_BLOCK: Final = 1 << 24
"""Elements whose bins are worked out at a time on a device: 128 MiB of temporaries at most."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, in any order; a copy only for a tensor with holes, or of negatives."""
    tensor = tensor.resolve_neg()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        # channels_last and transposed gradients: dense memory in another order, which no statistic depends on.
        return tensor.as_strided((tensor.numel(),), (1,))
    # Not reshape, which leaves a tensor of one dimension as it is, gaps and all.
    return tensor.contiguous().view(-1)


# Hot path: training thread, once per optimizer step.
def read_cpu(gradients: list[torch.Tensor]) -> Readback:
    """Statistics of non-empty dense gradients on the CPU; a table of shape (len(gradients), 7)."""
    kernel = native.load()
    table = native.table_of(gradients, flat) if kernel is not None else None
    if kernel is None or table is None:
        return KnownReadback(recipe.partials([flat(gradient) for gradient in gradients]))
    return KnownReadback(kernel.partials(table))


# Hot path: training thread, once per optimizer step. On a device it must not read a value back.
def read_norms(gradients: list[torch.Tensor]) -> Readback:
    """What a norm needs, of non-empty dense gradients of one device and dtype.

    Returns:
        A table of shape (len(gradients), 3): count, sum of squares, and the number of non-finite elements, which is 0
        where the sum of squares is finite and else counted.
    """
    if gradients and gradients[0].device.type != "cpu":
        return _read_norms_of_device([flat(gradient) for gradient in gradients])
    kernel = native.load()
    table = native.table_of(gradients, flat) if kernel is not None else None
    if kernel is None or table is None:
        return KnownReadback(recipe.norms([flat(gradient) for gradient in gradients]))
    return KnownReadback(kernel.norms(table))


# Hot path: training thread. On a device it must not read a value back.
def read_histograms(gradients: list[torch.Tensor], every: int = 1) -> Readback:
    """Histograms of log2 magnitude of dense gradients of one device and dtype.

    Args:
        every: count one block of 4096 elements in `every`, beginning with the first (`native.SAMPLE_EVERY` costs
            next to nothing). Only the native kernel samples; without it everything is counted.

    Returns:
        Counts in bins, shape (len(gradients), 256); what a bin is says `gradiometer.capture.native`. The sum of a
        row is the number of elements that were counted.
    """
    if gradients and gradients[0].device.type != "cpu":
        return readback.start(torch.stack([_bins_of_device(flat(gradient)) for gradient in gradients]))
    kernel = native.load()
    table = native.table_of(gradients, flat) if kernel is not None else None
    if kernel is None or table is None:
        return KnownReadback(np.stack([_bins_of_cpu(flat(gradient)) for gradient in gradients]))
    return KnownReadback(kernel.histograms(table, every).astype(np.float64))


def read_sparse_histogram(gradient: torch.Tensor) -> Readback:
    """As `read_histograms`, of one sparse COO gradient on the CPU, its implicit zeros included; shape (1, 256)."""
    stored = gradient.coalesce().values()
    bins = _bins_of_cpu(flat(stored))
    bins[0] += math.prod(gradient.shape) - stored.numel()
    return KnownReadback(bins[None, :])


def _exponents(values: torch.Tensor) -> torch.Tensor:
    """The bin of every element; int32."""
    if values.dtype != torch.float64:
        return (values.float().view(torch.int32) >> 23) & 255
    # float64 has 11 bits of exponent, biased by 1023 instead of 127; the largest one means "not finite" in both.
    wide = (values.view(torch.int64) >> 52) & 2047
    return torch.where(wide == 2047, 255, (wide - (1023 - 127)).clamp(0, 254)).to(torch.int32)


def _bins_of_cpu(values: torch.Tensor) -> Floats:
    bins = np.zeros(native.NUM_BINS)
    for block in recipe.cut(values.detach()):
        bins += np.bincount(_exponents(block).numpy(), minlength=native.NUM_BINS)
    return bins


def _bins_of_device(values: torch.Tensor) -> torch.Tensor:
    """Shape (256,), int32. torch.bincount would wait for the device to learn how many bins there are."""
    bins = torch.zeros(native.NUM_BINS, dtype=torch.int32, device=values.device)
    for block in torch.split(values.detach(), _DEVICE_BLOCK):
        exponents = _exponents(block)
        if values.is_cuda:
            # Counts in shared memory; half of all elements fall into two or three bins, where scatter_add_ queues up.
            bins += torch.histc(exponents, bins=native.NUM_BINS, min=0, max=native.NUM_BINS - 1)
        else:
            bins.scatter_add_(0, exponents.long(), torch.ones_like(exponents))
    return bins


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
        _nums_nonfinite(flats),
    ]
    packed = torch.stack([column.to(wide) for column in columns])
    return _DeviceTable(readback.start(packed), [values.numel() for values in flats])


def _nums_nonfinite(flats: list[torch.Tensor]) -> torch.Tensor:
    # x - x is 0 for a finite x and NaN, which is not zero, for the others.
    return torch.stack([torch.count_nonzero(values - values) for values in flats])


def _read_norms_of_device(flats: list[torch.Tensor]) -> Readback:
    wide = readback.widest_dtype(flats[0].device)
    norms = torch.stack(list(torch._foreach_norm(flats, 2, dtype=wide)))
    packed = torch.stack([norms, _nums_nonfinite(flats).to(wide)])
    return _DeviceNorms(readback.start(packed), [values.numel() for values in flats])


class _DeviceNorms:
    """Lays out what `_read_norms_of_device` packed."""

    __slots__ = ("_counts", "_packed")

    def __init__(self, packed: Readback, counts: list[int]) -> None:
        self._packed = packed
        self._counts = counts

    def values(self) -> Floats:
        """Table of shape (gradients, 3); agent thread only."""
        norm, num_nonfinite = self._packed.values()
        with np.errstate(all="ignore"):
            sum_squares = np.square(norm)
        known = np.where(np.isfinite(sum_squares), 0.0, num_nonfinite)
        return np.stack([np.array(self._counts, dtype=np.float64), sum_squares, known], axis=1)


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
