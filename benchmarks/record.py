"""What every benchmark tells about its machine, and where its result is kept: one JSON file per benchmark and day."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def machine(**more: Any) -> dict[str, Any]:
    """Processor, memory, load and Python of this machine, and whatever else matters to the benchmark."""
    described: dict[str, Any] = {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    return described | more


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of packages of this environment; "absent" for one that is not installed."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def save(benchmark: str, figures: dict[str, Any], *, name: str = "", **more: Any) -> Path:
    """Write `results/<name>_<date>.json`, over an earlier one of the same day.

    Args:
        benchmark: the script's name.
        name: of the file, if it is not the script's.
        more: told about the machine.
    """
    now = datetime.datetime.now(datetime.UTC)
    result = {
        "benchmark": benchmark,
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(**more),
        **figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name or benchmark}_{now.date()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that at least `share` of all values do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def spread(durations_s: Iterable[float], *, unit: str = "ms") -> dict[str, Any]:
    """Number, median, 99th percentile and maximum; `unit` is "ms" or "us"."""
    ordered = sorted(durations_s)
    scale = {"ms": 1e3, "us": 1e6}[unit]
    return {
        "count": len(ordered),
        f"p50_{unit}": round(scale * statistics.median(ordered), 3),
        f"p99_{unit}": round(scale * quantile(ordered, 0.99), 3),
        f"max_{unit}": round(scale * ordered[-1], 3),
    }
