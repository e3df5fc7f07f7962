"""A run as an object: closed by `with`, and what its copy or pickle is, since models and trainers that hold it are copied."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from gradiometer import exits
from gradiometer.phases import TimesData


class Handle(TimesData):
    """Something of which there is one, like an open file."""

    def finish(self, exit_code: int = 0) -> None:
        """Close it."""
        raise NotImplementedError

    def note_exception(self, error: BaseException) -> None:
        """Record an exception that ends it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, SystemExit):
            self.finish(0 if error is None else exits.exit_code_of(error.code))
        else:
            self.note_exception(error)
            self.finish(1)

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
