"""Finds the first module whose output held NaN or Inf in the forward pass.

A gradient can only say which layers went bad in backward order; a NaN born in the forward pass spoils all of them.
Forward hooks on the leaf modules look at each output. One in ordinary memory that the native kernel finds finite is
done with at once; of any other the extremes are kept as device scalars and read back once per optimizer step, on the
agent's thread. Nothing of an output is kept, nothing is added to the autograd graph and no random number is drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from gradiometer.capture import finite, layout, readback, scalars, scripting
from gradiometer.capture.compiled import is_compiled
from gradiometer.capture.naming import PlainNames
from gradiometer.capture.readback import Readback
from gradiometer.guard import Guard

MAX_LEAVES: Final = 512
MAX_MODULES_NAMED: Final = 20
_FOLD: Final = 1024
"""Outputs held as loose scalars before they are packed into one tensor: bounds memory under long accumulation."""
_NEVER_FIRST: Final = frozenset(
    {
        torch.nn.CELU,
        torch.nn.ELU,
        torch.nn.Flatten,
        torch.nn.Hardsigmoid,
        torch.nn.Hardtanh,
        torch.nn.Identity,
        torch.nn.MaxPool1d,
        torch.nn.MaxPool2d,
        torch.nn.MaxPool3d,
        torch.nn.Mish,
        torch.nn.ReLU,
        torch.nn.ReLU6,
        torch.nn.Sigmoid,
        torch.nn.SiLU,
        torch.nn.Softmax,
        torch.nn.Softsign,
        torch.nn.Tanh,
        torch.nn.Tanhshrink,
        torch.nn.Unflatten,
    }
)
"""Modules that make nothing but finite numbers of finite numbers: a bad output of theirs came in. Not here: GELU, dropout and
pooling by averages, which multiply or add up and so may overflow, and whatever is derived from these."""
MAX_BLOCKS: Final = 64
"""Packed tensors kept per step; outputs after 65,536 in one step are not looked at."""


class ForwardReport:
    """Extremes of the outputs of one step that may not be finite, on their way to the agent's thread.

    Args:
        order: names of the modules that made them, in forward order.
        extremes: for each block of outputs, values of shape (2 * outputs,): minimum and maximum in turn.
    """

    __slots__ = ("_extremes", "_order")

    def __init__(self, order: tuple[str, ...], extremes: tuple[Readback, ...]) -> None:
        self._order = order
        self._extremes = extremes

    def nonfinite_modules(self) -> list[str]:
        """Modules with a non-finite output, first in forward order first; at most 20. Agent thread only."""
        if not self._extremes:
            return []
        values = np.concatenate([block.values() for block in self._extremes]).reshape(-1, 2)
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        names = dict.fromkeys(self._order[index] for index in bad)
        return list(names)[:MAX_MODULES_NAMED]


def joined(reports: Sequence[ForwardReport]) -> ForwardReport | None:
    """Reports of parts of one step, in order, as one; None of none."""
    if len(reports) <= 1:
        return reports[0] if reports else None
    order = tuple(name for report in reports for name in report._order)
    return ForwardReport(order, tuple(block for report in reports for block in report._extremes))


class _LeafHook:
    """A forward hook that a copy or a pickle of the model leaves behind."""

    __slots__ = ("_entered", "_name", "_record")

    def __init__(self, guard: Guard, record: Callable[[str, Any], None], name: str) -> None:
        self._entered, self._record = guard.entered, record
        self._name = name

    # Hot path: training thread, once per leaf module and forward pass. Must return None (anything else would
    # replace the output), keep no reference to the output, and read no value.
    def __call__(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        # While torch.compile traces, the test is a constant, so a model compiled later gets no side effect. What
        # torch.jit.trace records must not hold operations of ours.
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if torch._C._get_tracing_state() is not None:
            return
        self._entered("forward probe", self._record, self._name, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # The bound method of nullcontext takes what a hook takes, does nothing and returns None. It is in every
        # Python, so a model saved whole can be loaded where this package is not installed.
        return (getattr, (contextlib.nullcontext(), "__exit__"))

    def __deepcopy__(self, _memo: Any) -> Any:
        return scripting.LeftBehind()


class ForwardProbe:
    """Forward hooks on the leaf modules of one model."""

    def __init__(self, model: torch.nn.Module, guard: Guard, prefix: str = "") -> None:
        self._order: list[str] = []
        self._loose: list[torch.Tensor] = []
        self._blocks: list[Readback] = []
        self._has_seen_any = False
        self._is_known_finite = finite.tester()
        scripting.hide(self, _LeafHook)
        names = PlainNames(model)
        self._handles = [
            module.register_forward_hook(_LeafHook(guard, self._record, prefix + names.of(name)))
            for name, module in leaves(model)
        ]

    # Hot path: called by the hooks, through the guard.
    def _record(self, name: str, output: Any) -> None:
        """Look at one output."""
        tensor = first_floating(output)
        if tensor is None or scalars.is_transformed(tensor) or tensor.numel() == 0:
            return
        if self._is_known_finite(tensor):
            self._has_seen_any = True
        else:
            self._keep(name, tensor)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        if len(self._blocks) >= MAX_BLOCKS:
            return
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        with torch.no_grad():
            self._loose += torch.aminmax(tensor.detach())
        self._has_seen_any = True
        self._order.append(name)
        if len(self._loose) >= 2 * _FOLD:
            self._fold()

    def _fold(self) -> None:
        # Modules of one model may sit on several devices: consecutive outputs of one device make a block.
        while self._loose:
            device = self._loose[0].device
            end = next((i for i, value in enumerate(self._loose) if value.device != device), len(self._loose))
            self._blocks.append(readback.start(readback.pack(self._loose[:end])))
            self._loose = self._loose[end:]

    def has_seen_any(self) -> bool:
        """Whether a forward pass in training mode has run since the last `take`."""
        return self._has_seen_any

    def take(self) -> ForwardReport | None:
        """What may not have been finite since the last call; None: everything was, or nothing was seen."""
        self._has_seen_any = False
        self._fold()
        if not self._blocks:
            return None
        report = ForwardReport(tuple(self._order), tuple(self._blocks))
        self._order, self._blocks = [], []
        return report

    def close(self) -> None:
        """Remove the hooks."""
        scripting.show(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._order, self._loose, self._blocks = [], [], []
        self._has_seen_any = False


def leaves(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules without submodules, by name, whose output may be the first that is not finite."""
    for name, module in model.named_modules():
        if next(module.children(), None) is None and type(module) not in _NEVER_FIRST:
            yield name, module


def why_not(model: torch.nn.Module, forward: bool | None) -> str | None:
    """Why the forward probe stays off for this model, or None if it can be on.

    Args:
        forward: the user's wish; None: on where it is known to be cheap.
    """
    if forward is False:
        return "switched off by watch(forward=False)"
    modules = list(model.modules())
    if any(is_compiled(module) for module in modules):
        return "the model is compiled: a hook with a side effect would break its graphs"
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        return "the model is a TorchScript module"
    if forward is None:
        return _why_not_by_default(model)
    return None


def _why_not_by_default(model: torch.nn.Module) -> str | None:
    num_leaves = sum(1 for _ in leaves(model))
    if num_leaves > MAX_LEAVES:
        return f"the model has {num_leaves} leaf modules, more than {MAX_LEAVES}: pass watch(forward=True) to probe them"
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return "the model is on an accelerator, where the probe's cost has not been measured: pass watch(forward=True)"
    return None


def first_floating(output: Any, depth: int = 3) -> torch.Tensor | None:
    """The first floating-point tensor in a module's output (a tensor, tuple, list, dict or dataclass-like)."""
    if type(output) is not torch.Tensor and layout.is_distributed(output):
        output = output._local_tensor
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() and output.layout == torch.strided else None
    if depth == 0:
        return None
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    )
    return next((found for part in parts if (found := first_floating(part, depth - 1)) is not None), None)
