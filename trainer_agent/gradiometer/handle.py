"""What a copy or a pickle of a run is: runs hang on models and trainers, and those are copied and saved."""

from __future__ import annotations

from typing import Any, Self


class Handle:
    """Something of which there is one, like an open file."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        # An EMA of a model that holds the run: both hold the same run.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (disabled_run, ())


def disabled_run() -> Any:
    """In another process, or loaded from a checkpoint, it is not that run: it does nothing there."""
    from gradiometer import settings
    from gradiometer.run import Run

    return Run(settings.DISABLED, None)
