"""Sends gradients to what reads them best: the native kernel, the Triton kernel or torch operations."""

from __future__ import annotations

import torch

from gradiometer.capture import eager, kernel
from gradiometer.capture.readback import KnownReadback, Readback
from gradiometer.capture.statistics import NORMS, SUM_SQUARES, Floats

Blocks = tuple[tuple[list[int], Readback], ...]
"""Row numbers in a table, and the rows."""


class Found:
    """Gradients of one step, by what can be read together. Must not outlive the reading: it holds gradients."""

    __slots__ = ("dense", "sparse")

    def __init__(self) -> None:
        self.dense: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
        self.sparse: list[tuple[int, torch.Tensor]] = []

    def rows(self) -> list[int]:
        """Of all gradients."""
        return [row for rows, _ in self.dense.values() for row in rows] + [row for row, _ in self.sparse]

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
            values = eager.read_sparse(gradient)
            blocks.append(([row], values if full else OnlyNorms(values)))
        for key, (rows, gradients) in found.dense.items():
            blocks.append((rows, self._read_dense(key, gradients, full=full)))
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


def known_finite(blocks: Blocks) -> bool:
    """Whether no norm is known to be not finite. What is still on its way from a device is not known, and not asked."""
    column = NORMS.index(SUM_SQUARES)
    known = [block for _, block in blocks if isinstance(block, KnownReadback)]
    return all(bool((block.values()[:, column] < float("inf")).all()) for block in known)
