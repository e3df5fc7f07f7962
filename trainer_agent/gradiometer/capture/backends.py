"""Sends gradients to what reads them best: the native kernel, the Triton kernel or torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import torch

from gradiometer.capture import eager, kernel
from gradiometer.capture.readback import KnownReadback, Readback
from gradiometer.capture.statistics import NORMS, NUM_NONFINITE, Floats

REAL_DTYPES: Final = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
Blocks = tuple[tuple[list[int], Readback], ...]
"""Row numbers in a table, and the rows."""


_LAYOUT, _DTYPE, _DEVICE = attrgetter("layout"), attrgetter("dtype"), attrgetter("device")


class Found:
    """Gradients of one step, by what can be read together. Must not outlive the reading: it holds gradients."""

    __slots__ = ("dense", "sparse")

    def __init__(self) -> None:
        self.dense: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
        self.sparse: list[tuple[int, torch.Tensor]] = []

    def rows(self) -> list[int]:
        """Of all gradients."""
        return [row for rows, _ in self.dense.values() for row in rows] + [row for row, _ in self.sparse]

    # Hot path: training thread, once per optimizer step.
    def add_alike(self, rows: Sequence[int], gradients: list[torch.Tensor]) -> bool:
        """Add all if they are what they nearly always are: plain, dense, of one device and dtype, none missing or empty.

        It walks them in C only, because of thousands of small gradients. False: nothing was added.
        """
        if set(map(type, gradients)) != {torch.Tensor} or set(map(_LAYOUT, gradients)) != {torch.strided}:
            return False
        dtypes, devices = set(map(_DTYPE, gradients)), set(map(_DEVICE, gradients))
        if len(dtypes) > 1 or len(devices) > 1 or not REAL_DTYPES.issuperset(dtypes):
            return False
        device = devices.pop()
        if device.type == "meta" or not all(map(torch.Tensor.numel, gradients)):
            return False
        self.dense[device, dtypes.pop()] = (list(rows), gradients)
        return True

    def add(self, row: int, gradient: torch.Tensor) -> None:
        """A gradient that is not empty, and its row in the table."""
        if gradient.layout != torch.strided:
            self.sparse.append((row, gradient))
            return
        key = (gradient.device, gradient.dtype)
        group = self.dense.get(key)
        if group is None:
            group = self.dense[key] = ([], [])
        group[0].append(row)
        group[1].append(gradient)


class Backends:
    """Reads the gradients of one watch, with what it has to remember for that from step to step."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[torch.device, torch.dtype], kernel.MultiTensor] = {}

    # Hot path: training thread, once per optimizer step. On a device it must not read a value back.
    def read(self, found: Found, *, full: bool) -> Blocks:
        """Rows of all statistics, or of those of a norm alone."""
        blocks: list[tuple[list[int], Readback]] = []
        for row, gradient in found.sparse:
            values = eager.read_sparse(gradient).values()
            # Known here and now, so that one that is not finite is noticed as of any other.
            blocks.append(([row], KnownReadback(values if full else values[:, NORMS])))
        for key, (rows, gradients) in found.dense.items():
            blocks.append((rows, self._read_dense(key, gradients, full=full)))
        return tuple(blocks)

    # Hot path: training thread, in a step whose histogram is wanted. On a device it must not read a value back.
    def histograms(self, found: Found) -> Blocks:
        """Rows of counts, shape (gradients, 256)."""
        blocks = [([row], eager.read_sparse_histogram(gradient)) for row, gradient in found.sparse]
        blocks += [(rows, eager.read_histograms(gradients)) for rows, gradients in found.dense.values()]
        return tuple(blocks)

    def _read_dense(
        self, key: tuple[torch.device, torch.dtype], gradients: list[torch.Tensor], *, full: bool
    ) -> Readback:
        device, dtype = key
        if device.type == "cuda" and kernel.is_ready(device, dtype):
            multi_tensor = self._kernels.get(key)
            if multi_tensor is None:
                multi_tensor = self._kernels[key] = kernel.MultiTensor(device, dtype)
            # It reads everything in one pass; torch's norms alone take more.
            rows = multi_tensor.read(gradients)
            return rows if full else OnlyNorms(rows)
        if not full:
            return eager.read_norms(gradients)
        return eager.read_cpu(gradients) if device.type == "cpu" else eager.read_device(gradients)


class OnlyNorms:
    """The columns of a norm, of a readback of all."""

    __slots__ = ("_all",)

    def __init__(self, everything: Readback) -> None:
        self._all = everything

    def values(self) -> Floats:
        """See `Readback`."""
        return self._all.values()[:, NORMS]


# Hot path: training thread, once per optimizer step.
def known_finite(blocks: Blocks, *, full: bool = False) -> bool:
    """Whether no element is known to be not finite. What is still on its way from a device is not known, and not asked.

    Args:
        full: the blocks hold all statistics, not those of a norm alone.
    """
    # Not the sum of squares, which is infinite for finite float64 elements beyond 1e154 too.
    column = NUM_NONFINITE if full else NORMS.index(NUM_NONFINITE)
    known = [block for _, block in blocks if isinstance(block, KnownReadback)]
    return not any(bool(block.values()[:, column].any()) for block in known)
