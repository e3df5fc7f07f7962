"""Memory of tensors, of the device and of the process, by metric name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

RSS_METRIC: Final = "memory/process_rss_bytes"
DEVICE_METRICS: Final = (
    "memory/allocated_bytes",
    "memory/reserved_bytes",
    "memory/peak_allocated_bytes",
    "memory/alloc_retries",
    "memory/fragmentation_fraction",
)
"""Told as unavailable where there is no such allocator, in the order of `device_numbers`."""
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
MAX_DEPTH: Final = 4
"""Levels of lists and dicts in the state of one parameter."""


# Hot path: training thread, once per step. One call into the allocator's counters; no sync, no reset of the peaks,
# which belong to the user.
def device_numbers(device: torch.device) -> dict[str, float]:
    """What torch's CUDA allocator says of `device`. The peak is since the user last reset it, if ever.

    `memory/fragmentation_fraction` is the share of the reserved memory that is free, but in pieces of blocks that are in
    use elsewhere, so that it cannot be given back (torch's `inactive_split_bytes`).
    """
    # Not `memory_stats`, which flattens the same dict to some 80 sorted entries first.
    stats: Any = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]["current"]
    split = stats["inactive_split_bytes"]["all"]["current"]
    values = (
        allocated["current"],
        reserved,
        allocated["peak"],
        stats["num_alloc_retries"],
        split / reserved if reserved else 0.0,
    )
    return dict(zip(DEVICE_METRICS, map(float, values), strict=True))


def process_rss_bytes() -> float | None:
    """Resident memory of this process; None where the system does not say. Agent thread: reads a file."""
    if sys.platform != "linux":
        return None
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return float(resident_pages * os.sysconf("SC_PAGE_SIZE"))


class StorageBytes:
    """Adds up what tensors occupy on this rank, each storage once however many tensors share it.

    Args:
        seen: storages that were counted already; added to.

    Attributes:
        num_unknown: tensors whose memory could not be found.
    """

    def __init__(self, seen: set[int]) -> None:
        self._seen = seen
        self._bytes: dict[tuple[torch.dtype, torch.device], int] = {}
        self.num_unknown = 0

    @property
    def total(self) -> int:
        """Bytes on all devices."""
        return sum(self._bytes.values())

    @property
    def by_dtype(self) -> dict[str, int]:
        """Bytes by name of the type ("float32")."""
        found: dict[str, int] = {}
        for (dtype, _), num_bytes in self._bytes.items():
            name = str(dtype).removeprefix("torch.")
            found[name] = found.get(name, 0) + num_bytes
        return found

    def on(self, device: torch.device) -> int:
        """Bytes on one device."""
        return sum(num_bytes for (_, where), num_bytes in self._bytes.items() if where == device)

    # Hot path: training thread, for all tensors of a model in one step of 128.
    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors: of a DTensor the local shard, as allocated, padding and all."""
        for tensor in tensors:
            try:
                if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                    self._add(tensor)
                else:
                    for part in parts_of(tensor):
                        self._add(part)
            except (RuntimeError, NotImplementedError):
                # A layout without storages, such as mkldnn's.
                self.num_unknown += 1

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        # Not the address of the data, which is 0 for all empty ones.
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        place = (tensor.dtype, tensor.device)
        if place[1].type != "meta":
            self._bytes[place] = self._bytes.get(place, 0) + storage.nbytes()


def parts_of(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors with storages that make up `tensor`: itself, a DTensor's shard, a sparse one's indices and values."""
    if type(tensor) not in _PLAIN and is_lazy(tensor):
        # It has no memory before the first forward pass.
        return
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        # A DTensor names its mesh too.
        inner = (getattr(tensor, name) for name in names)
        for part in inner:
            if isinstance(part, torch.Tensor):
                yield from parts_of(part)
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


def states_of(optimizer: Any) -> tuple[Mapping[Any, Any], ...]:
    """The states of an optimizer by parameter: its own, and that of the one inside a ZeroRedundancyOptimizer.

    The latter has this rank's part of the state; the outer one's is filled when it is consolidated for a checkpoint.
    """
    inner = getattr(optimizer, "optim", None)
    if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
        return (optimizer.state, inner.state)
    return (optimizer.state,)


def tensors_in(state: Any, depth: int = MAX_DEPTH) -> Iterator[torch.Tensor]:
    """The tensors in the state of an optimizer, which may hold lists and dicts of them."""
    if isinstance(state, torch.Tensor):
        yield state
    elif depth and isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_in(value, depth - 1)
    elif depth and isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors_in(value, depth - 1)
