"""Memory of the device and of the process, by metric name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

import torch

RSS_METRIC: Final = "memory/process_rss_bytes"
DEVICE_METRICS: Final = ("memory/allocated_bytes", "memory/reserved_bytes", "memory/peak_allocated_bytes")


# Hot path: training thread, once per step. One call into the allocator's counters; no sync, no reset of the peaks,
# which belong to the user.
def device_bytes(device: torch.device) -> dict[str, float]:
    """What torch's CUDA allocator holds on `device`. The peak is since the user last reset it, if ever."""
    # Not `memory_stats`, which flattens the same dict to some 80 sorted entries first.
    stats: Any = torch.cuda.memory_stats_as_nested_dict(device)
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    values = (allocated["current"], reserved["current"], allocated["peak"])
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
