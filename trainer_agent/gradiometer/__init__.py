"""Gradiometer's trainer-side agent: `import gradiometer as gm`.

Names are loaded on first use, so that importing the package costs nothing, never imports torch, and the server can
share `gradiometer.wire` without loading the agent.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradiometer import checks
    from gradiometer.run import Run, init

__version__ = "0.1.0"

_HOME = {"init": "gradiometer.run", "Run": "gradiometer.run"}

_MODULES = ("checks",)

__all__ = ["Run", "__version__", "checks", "init"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"gradiometer.{name}")
    raise AttributeError(f"module 'gradiometer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
