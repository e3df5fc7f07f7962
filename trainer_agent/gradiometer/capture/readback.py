"""Brings small tensors from a device to the agent's thread without the training thread waiting for them.

The training thread starts an asynchronous copy into pinned memory and records an event; the agent's thread waits for
the event. On CUDA a copy that is not waited for reads garbage, and a wait on the training thread would be a sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

import numpy as np
import torch

from gradiometer.capture.statistics import Floats


class Readback(Protocol):
    """Values on their way from a device."""

    def values(self) -> Floats:
        """The values as float64, in the tensor's shape. Agent thread only: may wait for the device."""
        ...


class HostReadback:
    """Values in ordinary memory, or on a device for which no asynchronous copy is known: read when asked for."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def values(self) -> Floats:
        """See `Readback`."""
        return cast(Floats, self._tensor.cpu().to(torch.float64).numpy())


class CudaReadback:
    """Values in pinned memory, valid once the event has passed."""

    __slots__ = ("_event", "_pinned")

    # Hot path: training thread. Two asynchronous launches; must not synchronise.
    def __init__(self, tensor: torch.Tensor) -> None:
        # torch's caching host allocator hands out a pinned block again only after the copies into it are done, so it is
        # the ring of slots that one would write here: see docs/decisions/0013-pinned-memory.md.
        # The device is named, because torch.set_default_device would choose another.
        self._pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._pinned.copy_(tensor, non_blocking=True)
        # blocking: a thread that waits must sleep, not spin on a core that the training needs.
        self._event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(tensor.device))

    def values(self) -> Floats:
        """See `Readback`."""
        self._event.synchronize()
        return cast(Floats, self._pinned.to(torch.float64).numpy())


class KnownReadback:
    """Values that were computed in ordinary memory already."""

    __slots__ = ("_values",)

    def __init__(self, values: Floats) -> None:
        self._values = values

    def values(self) -> Floats:
        """See `Readback`."""
        return self._values


KNOWN_ZERO: Final = KnownReadback(np.array([0.0]))
KNOWN_ONE: Final = KnownReadback(np.array([1.0]))


class LargestReadback:
    """The largest of several single values."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Readback]) -> None:
        self._parts = tuple(parts)

    def values(self) -> Floats:
        """See `Readback`."""
        return np.array([max(float(part.values().ravel()[0]) for part in self._parts)])


def largest(parts: Sequence[Readback]) -> Readback | None:
    """The largest of several single values; None of none."""
    return LargestReadback(parts) if len(parts) > 1 else parts[0] if parts else None


def start(tensor: torch.Tensor) -> Readback:
    """Begin to bring `tensor`, which nobody else will change, to the host.

    Raises:
        RuntimeError: a CUDA graph is being captured, which pinned memory and events of ours would break.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("inside a CUDA graph no value can be brought to the host")
    return CudaReadback(tensor) if tensor.is_cuda else HostReadback(tensor)


def widest_dtype(device: torch.device) -> torch.dtype:
    """The widest float of a device: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def pack(scalars: list[torch.Tensor]) -> torch.Tensor:
    """Copy one-element tensors of one device into a new tensor of shape (len(scalars),)."""
    flat = [scalar.detach().reshape(()) for scalar in scalars]
    dtype = widest_dtype(flat[0].device)
    if any(scalar.dtype != flat[0].dtype for scalar in flat):
        flat = [scalar.to(dtype) for scalar in flat]
    return torch.stack(flat).to(dtype)


def as_numbers(values: Floats) -> list[float]:
    """Python floats of a one-dimensional array."""
    return [float(value) for value in np.atleast_1d(values)]
