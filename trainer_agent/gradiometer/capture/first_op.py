"""Finds the first operation whose result is not finite, in a forward and backward pass run once more.

Every operation below autograd goes through a `TorchDispatchMode`, in the backward pass too. An operation is the origin
if it made a NaN of values without one, or an infinity of finite ones. What only puts an infinity in on purpose (the
`masked_fill` of an attention mask) is none; what only passes one on is one where the value came from a weight, a
buffer or the batch, which then holds it already. Anomaly mode tells where in the user's code a backward node was made.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_ON_PURPOSE: Final = frozenset(
    [
        "masked_fill",
        "where",
        "full",
        "full_like",
        "fill",
        "scalar_tensor",
        "new_full",
        "index_put",
        "index_fill",
        "masked_scatter",
        "constant_pad_nd",
        "lift_fresh",
        "lift_fresh_copy",
    ]
)
"""What may write an infinity because it was told to."""
_UNWRITTEN: Final = frozenset(
    [
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "resize",
        "set",
    ]
)
"""What returns memory that nobody has written yet."""
State = tuple[int, int]
"""Numbers of NaN and of infinite elements."""
_TORCH: Final = str(Path(torch.__file__).parent)
_HERE: Final = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """One floating-point tensor of an operation; extremes are over its finite elements.

    Attributes:
        name: of the weight, buffer or part of the batch that it is; empty for an intermediate value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_nan: int
    num_inf: int
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstOp:
    """The operation that made the first non-finite value.

    Attributes:
        op: e.g. `aten.exp.default`. `node`: the backward node, e.g. `ExpBackward0`; empty in the forward pass.
        module: path of the module that it belongs to; empty: outside all modules, e.g. in the loss.
        phase: `forward` or `backward`.
        place: file, line and text of the user's code.
        received: name of the weight or input that was not finite already; empty: the operation itself is the origin.
    """

    op: str
    node: str
    module: str
    phase: str
    place: str
    received: str
    inputs: tuple[TensorFacts, ...]
    output: TensorFacts


@dataclass(slots=True)
class Search:
    """What a search has seen so far."""

    found: FirstOp | None = None
    num_ops: int = 0
    _names: dict[int, tuple[str, bool]] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)

    def name(self, tensor: torch.Tensor, name: str, *, is_weight: bool = False) -> None:
        """Remember what a tensor and all views of it are, and keep it so that no other takes its place in memory."""
        place = _memory(tensor)
        if place:
            self._names.setdefault(place, (name, is_weight))
            self._kept.append(tensor)

    def name_of(self, tensor: torch.Tensor) -> str:
        """What a tensor is; empty for an intermediate value."""
        return self._names.get(_memory(tensor), ("", False))[0]

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight, in which no infinity can be meant."""
        return self._names.get(_memory(tensor), ("", False))[1]


class Finder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Use as a context around forward and backward; stops looking after the first find.

    Args:
        search: filled in.
        modules: says which module the code is in.
    """

    def __init__(self, search: Search, modules: Modules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._search, self._modules = search, modules

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and look at what came of it."""
        search = self._search
        inputs = [] if search.found is not None else _floats((args, kwargs))
        # Asked before: an operation in place overwrites what it read.
        before = [_state(tensor) for tensor in inputs]
        result = func(*args, **(kwargs or {}))
        if search.found is None:
            search.num_ops += 1
            self._judge(func, inputs, before, _floats(result))
        return result

    def _judge(
        self, func: Any, inputs: list[torch.Tensor], before: list[State], outputs: list[torch.Tensor]
    ) -> None:
        after = [_state(tensor) for tensor in outputs]
        makes_nan = any(state[0] for state in after)
        name = str(func.overloadpacket.__name__).rstrip("_")
        if not any(map(any, after)) or name in _UNWRITTEN or (name in _ON_PURPOSE and not makes_nan):
            return
        received = self._received(inputs, before)
        if received:
            if {_memory(tensor) for tensor in inputs} & {_memory(tensor) for tensor in outputs}:
                # A view of what was bad already.
                return
        elif any(map(any, before)) and not (makes_nan and not any(state[0] for state in before)):
            return
        worst = max(range(len(outputs)), key=lambda index: sum(after[index]))
        self._search.found = self._describe(func, inputs, before, outputs[worst], received)

    def _received(self, inputs: list[torch.Tensor], before: list[State]) -> str:
        """Name of the first weight that is not finite, or of another named tensor with a NaN; empty: none."""
        for tensor, (num_nan, num_inf) in zip(inputs, before, strict=True):
            # An infinity in a buffer or in the batch may be meant: a mask.
            if num_nan or (num_inf and self._search.is_weight(tensor)):
                name = self._search.name_of(tensor)
                if name:
                    return name
        return ""

    def _describe(
        self,
        func: Any,
        inputs: Sequence[torch.Tensor],
        before: Sequence[State],
        output: torch.Tensor,
        received: str,
    ) -> FirstOp:
        node: Any = torch._C._current_autograd_node()
        return FirstOp(
            op=str(func),
            node="" if node is None else str(node.name()),
            module=self._modules.current if node is None else self._modules.of_node(node),
            phase="forward" if node is None else "backward",
            place=_place_here() if node is None else _place_of(node),
            received=received,
            inputs=tuple(
                _facts(tensor, self._search.name_of(tensor), state)
                for tensor, state in zip(inputs, before, strict=True)
            ),
            output=_facts(output, "", _state(output)),
        )


class Modules:
    """Which module the running code belongs to, in the forward pass and for every node of the backward pass."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._stack: list[str] = []
        self._nodes: dict[Any, str] = {}
        self._handles: list[Any] = []
        self._inputs: list[set[Any]] = []
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._entering(name), with_kwargs=True, prepend=True),
                module.register_forward_hook(self._left(name), always_call=True),
            ]

    @property
    def current(self) -> str:
        """Path of the innermost module whose forward runs; empty outside the model and in the model itself."""
        return self._stack[-1] if self._stack else ""

    def of_node(self, node: Any) -> str:
        """Path of the module in whose forward a backward node was made."""
        return self._nodes.get(node, "")

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(_module: Any, args: Any, kwargs: Any) -> None:
            self._stack.append(name)
            self._inputs.append({tensor.grad_fn for tensor in _tensors((args, kwargs))})

        return enter

    def _left(self, name: str) -> Callable[..., None]:
        def leave(_module: Any, _args: Any, output: Any) -> None:
            self._stack.pop()
            stop = self._inputs.pop()
            self._claim(name, [tensor.grad_fn for tensor in _tensors(output)], stop)

        return leave

    def _claim(self, name: str, nodes: list[Any], stop: set[Any]) -> None:
        """Every node between a module's output and its inputs is its own, but for those of its children."""
        seen: set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in stop or node in seen:
                continue
            seen.add(node)
            self._nodes.setdefault(node, name)
            nodes += [following for following, _ in node.next_functions]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _floats(value: Any) -> list[torch.Tensor]:
    return [
        tensor
        for tensor in _tensors(value)
        if tensor.is_floating_point()
        and tensor.numel()
        and tensor.layout == torch.strided
        and not tensor.is_meta
    ]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _state(tensor: torch.Tensor) -> State:
    """Numbers of NaN and of infinite elements."""
    with _disable_current_modes():
        plain = tensor.detach()
        finite = torch.isfinite(plain)
        if bool(finite.all()):
            return 0, 0
        num_nan = int(torch.isnan(plain).sum())
        return num_nan, int((~finite).sum()) - num_nan


def _facts(tensor: torch.Tensor, name: str, state: State) -> TensorFacts:
    with _disable_current_modes():
        finite = tensor.detach()[torch.isfinite(tensor.detach())].double()
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (None, None)
    return TensorFacts(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        num_nan=state[0],
        num_inf=state[1],
        low=low,
        high=high,
    )


def _place_here() -> str:
    frames = traceback.extract_stack()
    own = [frame for frame in frames if not frame.filename.startswith((_TORCH, _HERE, "<"))]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


def _place_of(node: Any) -> str:
    """Where the forward operation of a backward node was written, as anomaly mode noted it."""
    lines = node.metadata.get("traceback_") or []
    own = [line for line in lines if _TORCH not in line and _HERE not in line]
    return " ".join(own[-1].split()) if own else ""


def is_finite(values: Sequence[torch.Tensor]) -> bool:
    """Whether all elements of all of them are finite."""
    return not any(any(_state(value)) for value in values)
