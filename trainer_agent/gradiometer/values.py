"""What users may log: flattens nested dicts and sorts values into numbers, device scalars and mistakes.

Works without torch: a value can only be a tensor if the user has imported torch.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from gradiometer import wire

if TYPE_CHECKING:
    import torch

_MAX_DEPTH: Final = 16


class BadValue(ValueError):
    """Something that cannot be logged.

    Attributes:
        reason: a short text, equal for equal mistakes, under which they are counted.
        detail: which name or value it was.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def flatten(metrics: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Names joined with "/", and values, of a nested mapping."""
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            yield from flatten(value, f"{name}/", depth + 1)
        else:
            yield name, value


def checked_name(name: str) -> str:
    """The name itself; raises `BadValue` if it cannot name a metric."""
    problem = wire.name_problem(name)
    if problem is not None:
        raise BadValue("a metric name is not valid", f"{name[:80]!r}: {problem}")
    return name


def as_number(name: str, value: object) -> float | torch.Tensor | None:
    """A float, a one-element tensor to be read later, or None for a value that is absent.

    Raises:
        BadValue: it is neither.
    """
    # Type first, without isinstance chains: floats are what is logged most.
    if type(value) is float:
        return value
    if value is None:
        return None
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _as_scalar_tensor(name, value)
    if isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0:
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            raise BadValue("a value is not a number", f"{name}: {error}") from error
    raise BadValue("a value is not a number", f"{name} is a {type(value).__name__}")


def _as_scalar_tensor(name: str, tensor: Any) -> torch.Tensor:
    from gradiometer.capture import scalars

    if tensor.numel() != 1:
        raise BadValue(
            "a tensor does not have exactly one element", f"{name} has shape {tuple(tensor.shape)}"
        )
    local = scalars.local_scalar(tensor)
    if local is None:
        raise BadValue(
            "a tensor's value cannot be read", f"{name} is a sharded, complex or meta {type(tensor).__name__}"
        )
    return local


def plain(value: object, depth: int = 0) -> Any:
    """`value` as numbers, text, lists and dicts, for a run's config; what is neither becomes its `repr`."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        number = int(value)
        return number if abs(number) < 2**63 else str(number)
    if isinstance(value, numbers.Real):
        return _plain_float(float(value))
    if depth >= _MAX_DEPTH:
        return repr(value)[:1000]
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth + 1) for item in value]
    return repr(value)[:1000]


def _plain_float(number: float) -> float | str:
    # JSON has no NaN and no infinity.
    return number if number - number == 0.0 else repr(number)
