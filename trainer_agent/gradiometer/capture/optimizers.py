"""The optimizers behind one watch: taken out of their wrappers, named, and seen as one where there are several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

_MAX_WRAPPERS: Final = 8
_MAX_DEPTH: Final = 4


class Optimizers:
    """One or more optimizers whose steps together are one step.

    Who only looks at `param_groups` and `state` (layouts, ledgers, checks) need not know how many there are.

    Attributes:
        all: in the order in which the user gave them.
        names: one for each; empty where the user gave none.
    """

    def __init__(self, named: Sequence[tuple[str, torch.optim.Optimizer]]) -> None:
        self.all = tuple(optimizer for _, optimizer in named)
        self.names = tuple(name for name, _ in named)

    @property
    def as_one(self) -> Any:
        """The optimizer itself where there is one, otherwise this."""
        return self.all[0] if len(self.all) == 1 else self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for optimizer in self.all for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all, by parameter."""
        return {key: value for optimizer in self.all for key, value in optimizer.state.items()}


def find(given: Any, model: torch.nn.Module) -> Optimizers | None:
    """The optimizers in what the user gave: one, a list or a mapping by name; None if something else is among them.

    Args:
        given: None asks for the optimizers that `_apply_optimizer_in_backward` hung on the model's parameters.
    """
    if given is None:
        given = list(_in_backward(model))
    named: dict[int, tuple[str, torch.optim.Optimizer]] = {}
    for name, candidate in _flat(given, "", _MAX_DEPTH):
        inner = unwrap(candidate)
        if not isinstance(inner, torch.optim.Optimizer):
            return None
        # The same one twice is one.
        named.setdefault(id(inner), (name, inner))
    return Optimizers(tuple(named.values())) if named else None


def each(given: Any) -> Iterator[Any]:
    """What is in a list or mapping of optimizers, or in several levels of them."""
    yield from (candidate for _, candidate in _flat(given, "", _MAX_DEPTH))


def _flat(given: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth and isinstance(given, Mapping):
        for key, value in given.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key), depth - 1)
    elif depth and isinstance(given, Iterable) and not isinstance(given, str) and not hasattr(given, "step"):
        for value in given:
            yield from _flat(value, name, depth - 1)
    else:
        yield name, given


def _in_backward(model: torch.nn.Module) -> Iterator[Any]:
    for parameter in model.parameters():
        yield from getattr(parameter, "_in_backward_optimizers", ())


def unwrap(optimizer: Any) -> Any:
    """The torch optimizer inside Accelerate's, Lightning's and similar wrappers, which have no hooks of their own."""
    found = candidate = optimizer
    for _ in range(_MAX_WRAPPERS):
        # Not `or`: a wrapper may define its own truth value.
        candidate = getattr(candidate, "optimizer", getattr(candidate, "_optimizer", None))
        if candidate is None:
            break
        found = candidate if isinstance(candidate, torch.optim.Optimizer) else found
    return found
