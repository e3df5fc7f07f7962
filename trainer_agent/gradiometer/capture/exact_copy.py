"""A copy of a model on which a loss can be evaluated again and again with the same outcome, for checks called by users."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class ExactCopy:
    """A deep copy of a model and a batch, in float64 where that works, otherwise in the model's own dtypes.

    Args:
        train: True or False: the mode to run in; None: as the model is.

    Raises:
        ValueError: see `gradiometer.checks.gradients`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        batches: list[Any],
        *,
        train: bool | None,
        seed: int,
    ) -> None:
        self._loss_fn, self._seed = loss_fn, seed
        self.devices = sorted({one.device.index or 0 for one in model.parameters() if one.is_cuda})
        try:
            self._make(model, batches, train, torch.float64)
            self._must_work()
        except (RuntimeError, TypeError) as refused:
            # A model with float32 constants or kernels of its own, or a device without float64.
            self._make(model, batches, train, None)
            try:
                self._must_work()
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"the loss cannot be computed on a copy of the model: {error}") from refused

    def _make(
        self, model: torch.nn.Module, batches: list[Any], train: bool | None, dtype: torch.dtype | None
    ) -> None:
        try:
            self.model = copy.deepcopy(model)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the model cannot be copied ({error}): pass the plain module, such as ddp_model.module"
            ) from error
        if train is not None:
            self.model.train(train)
        self.model.zero_grad(set_to_none=True)
        if dtype is not None:
            _widen(self.model, dtype)
        self.batches = [_as_dtype(batch, dtype) for batch in batches]
        own = next((one.dtype for one in self.model.parameters()), torch.float32)
        self.dtype = dtype or (own.to_real() if own.is_complex else own)
        self._buffers = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def _must_work(self) -> None:
        with self.alike():
            first, second = self.loss(self.batches[0]), self.loss(self.batches[0])
        if not math.isfinite(first.item()):
            raise ValueError(f"the loss is {first.item()}, so its gradient means nothing")
        if first.item() != second.item():
            raise ValueError(
                f"the loss is not the same twice ({first.item()!r}, then {second.item()!r}) though all random numbers are "
                "seeded alike: make loss_fn depend on nothing but the model and the batch"
            )
        if not first.requires_grad:
            raise ValueError("the loss has no graph: loss_fn must compute it from the model that it is given")

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Keep the process's random state, whatever is drawn inside."""
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=self.devices), torch.enable_grad():
                yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of the copy, 0-dim; inside `alike` only."""
        torch.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)
        with torch.no_grad():
            # Running statistics and power iterations move at every evaluation.
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        loss = self._loss_fn(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(f"loss_fn must return a tensor with one element, got {_shown(loss)}")
        return loss.reshape(())

    def gradient_of(self, losses: Callable[[], Iterator[torch.Tensor]]) -> dict[str, torch.Tensor | None]:
        """Gradients by parameter, summed over the backward passes of `losses`."""
        self.model.zero_grad(set_to_none=True)
        for loss in losses():
            loss.backward()  # type: ignore[no-untyped-call]
        found = {name: one.grad for name, one in self.trainable()}
        self.model.zero_grad(set_to_none=True)
        if all(gradient is None for gradient in found.values()):
            raise ValueError(
                "no parameter got a gradient: loss_fn must use the model that it is given, not another name for it"
            )
        return found

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Name and parameter of the copy."""
        return [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]


def _shown(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _widen(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's floating-point tensors into `dtype`, complex ones into its complex counterpart."""
    if any(one.is_complex() for one in [*model.parameters(), *model.buffers()]):
        # `to` would leave only the real parts of complex parameters.
        model._apply(lambda tensor: tensor.to(_counterpart(tensor, dtype)))  # type: ignore[no-untyped-call]
    else:
        model.to(dtype)


def _counterpart(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """What `tensor` becomes in a model of `dtype`: a whole number stays one, a complex number stays one."""
    if tensor.is_complex():
        return dtype.to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def _as_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    """`value` with its floating-point and complex tensors copied into `dtype`."""
    if isinstance(value, torch.Tensor):
        copied = value.detach().clone()
        return copied if dtype is None else copied.to(_counterpart(copied, dtype))
    if isinstance(value, Mapping):
        items = {key: _as_dtype(item, dtype) for key, item in value.items()}
        return items if type(value) is dict else _rebuilt(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_as_dtype(item, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_as_dtype(item, dtype) for item in value)
    return value


def _rebuilt(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
