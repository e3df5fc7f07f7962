"""What users may log: flattens nested dicts and sorts values into numbers, device scalars and mistakes.

Works without torch: a value can only be a tensor if the user has imported torch.
"""

from __future__ import annotations

import functools
import numbers
import operator
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from gradiometer import wire
from gradiometer.drops import Drops
from gradiometer.plain import encodable as encodable
from gradiometer.plain import plain as plain

if TYPE_CHECKING:
    import torch

MAX_COLUMNS_KEPT: Final = 4096
_MAX_DEPTH: Final = 16
_CONVERSION_ERRORS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a user's own `__float__` may raise: the value is bad, and those beside it must not be lost."""


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


def flatten(
    metrics: Mapping[Any, Any], prefix: str = "", outer: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Names joined with "/", and values, of a nested mapping.

    A mapping inside itself, or deeper than 16, comes out as a value; so the walk ends, and `as_number` refuses it.
    """
    outer = (*outer, id(metrics))
    for key, value in metrics.items():
        name = key if type(key) is str else _key_text(key)
        if prefix:
            name = f"{prefix}{name}"
        # Type first: asking whether it is a mapping takes longer than all the rest, and floats are logged most.
        if type(value) is float:
            yield name, value
        elif isinstance(value, Mapping) and len(outer) <= _MAX_DEPTH and id(value) not in outer:
            yield from flatten(value, f"{name}/", outer)
        else:
            yield name, value


def _key_text(key: object) -> str:
    try:
        return str(key)
    except Exception:  # noqa: BLE001  a user's __str__ may fail, and the other values of the call must not be lost
        # `checked_name` refuses the empty name.
        return ""


def integer_or_itself(value: Any) -> Any:
    """A plain int for every kind of integer (numpy's are none), anything else as it is."""
    try:
        return operator.index(value)
    except Exception:  # noqa: BLE001  a user's own __index__ may raise anything; then it is no integer
        return value


def is_train_loss(name: str) -> bool:
    """Whether the metric is a training loss: its name says loss, and its group is `train` or none."""
    group, _, last = name.rpartition("/")
    return group in ("", "train") and "loss" in last.lower()


def checked_name(name: str) -> str:
    """The name itself; raises `BadValue` if it cannot name a metric."""
    problem = wire.name_problem(name)
    if problem is not None:
        raise BadValue("a metric name is not valid", f"{name[:80]!r}: {problem}")
    return name


@functools.lru_cache(maxsize=MAX_COLUMNS_KEPT)
def column(name: str) -> wire.Column:
    """The column of a metric; raises `BadValue` if its name is not valid. Names come again in every step."""
    return wire.Column(checked_name(name))


def numbers_in(metrics: Mapping[Any, Any], drops: Drops, step: int) -> list[tuple[wire.Column, Any]]:
    """Columns, and numbers or one-element tensors, of a nested mapping; `drops` is told of each value that is none."""
    found: list[tuple[wire.Column, Any]] = []
    for name, value in flatten(metrics):
        try:
            number = as_number(name, value)
            if number is not None:
                found.append((column(name), number))
        except BadValue as mistake:
            drops.add(mistake.reason, step, detail=mistake.detail)
    return found


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
    if _looks_real(value):
        try:
            return float(value)  # type: ignore[arg-type]
        except _CONVERSION_ERRORS as error:
            raise BadValue("a value is not a number", f"{name}: {error}") from error
    raise BadValue("a value is not a number", f"{name} is a {type(value).__name__}")


def _looks_real(value: object) -> bool:
    if isinstance(value, numbers.Real):
        return True
    # Of numpy's scalars, text would be parsed, and of a complex number the imaginary part would be thrown away.
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    return getattr(value, "ndim", None) == 0 and kind not in "cSUMmV"


def _as_scalar_tensor(name: str, tensor: Any) -> torch.Tensor:
    from gradiometer.capture import scalars

    if tensor.numel() != 1:
        raise BadValue(
            "a tensor does not have exactly one element", f"{name} has shape {tuple(tensor.shape)}"
        )
    local = scalars.local_scalar(tensor)
    if local is None:
        raise BadValue(
            "a tensor's value cannot be read",
            f"{name} is a sharded, complex, sparse, quantized, meta or transformed {type(tensor).__name__}",
        )
    return local
