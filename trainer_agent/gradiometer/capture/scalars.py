"""Gathers named numbers, in memory or on a device, into one report without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from gradiometer import wire
from gradiometer.capture import layout, readback
from gradiometer.capture.readback import Readback
from gradiometer.reports import Scalars

_is_wrapped: Final[Any] = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)


# Hot path: training thread. At most one small copy per device; must not read a value.
@torch.no_grad()
def collect(values: Sequence[tuple[wire.Column, float | torch.Tensor]]) -> Scalars:
    """Copy the values as they are now. Tensors have one element each, and none is a sharded DTensor."""
    by_device: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
    numbers: list[float] = []
    for index, (_, value) in enumerate(values):
        if isinstance(value, torch.Tensor):
            indices, tensors = by_device.setdefault(value.device, ([], []))
            indices.append(index)
            tensors.append(value)
            numbers.append(0.0)
        else:
            numbers.append(value)
    pending: tuple[tuple[tuple[int, ...], Readback], ...] = tuple(
        (tuple(indices), readback.start(readback.pack(tensors))) for indices, tensors in by_device.values()
    )
    return Scalars(columns=tuple(column for column, _ in values), numbers=tuple(numbers), pending=pending)


def local_scalar(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor to read for a one-element tensor; None if its value is spread over ranks or does not exist."""
    if layout.is_distributed(tensor):
        placements = getattr(tensor, "placements", ())
        if not all(placement.is_replicate() for placement in placements):
            return None
        local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        tensor = local
    return tensor if _is_plain(tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor.is_complex() or tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.layout == torch.strided and not is_transformed(tensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether `tensor` exists only inside a torch.func transform (vmap, grad, ...), after which it cannot be read."""
    return _is_wrapped is not None and bool(_is_wrapped(tensor))
