"""What the overhead benchmark compares: every tool is attached, works for some steps and is taken off again.

A tool counts the CPU time that its own code takes on the training thread (`inside_s`), because the CPU time of whole
steps varies by more than a light tool costs. Other threads and processes of the tool are counted by the benchmark.
A tool whose package is not installed raises ImportError when it is made.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture import native
from gradiometer.capture.forward import _LeafHook
from gradiometer.guard import Guard


class Stopwatch:
    """Adds up the CPU time of the calling thread inside functions; calls inside calls count once."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        training = threading.get_ident()

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != training:
                return function(*args, **kwargs)
            self._depth, started_s = 1, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_s += time.thread_time() - started_s
                self._depth = 0

        return timed


class Tool(Protocol):
    """One way to know the gradients of a training.

    Attributes:
        inside: of the code on the training thread.
        folder: what it writes lies there; None: it writes nothing.
        num_early_steps: after which its work per step is what it will be.
    """

    inside: Stopwatch
    folder: Path | None
    num_early_steps: int

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None: ...
    def after_backward(self, loss: torch.Tensor) -> None: ...
    def after_step(self, loss: torch.Tensor) -> None: ...
    def detach(self) -> None: ...
    def close(self) -> None: ...


class Nothing:
    """The bare step, and the parent of the others."""

    num_early_steps = 1

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.inside = Stopwatch()
        self.folder: Path | None = None

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Before some steps; not timed."""

    def after_backward(self, loss: torch.Tensor) -> None:
        """The gradients are there."""

    def after_step(self, loss: torch.Tensor) -> None:
        """The optimizer is done."""

    def detach(self) -> None:
        """After these steps; not timed."""

    def close(self) -> None:
        """At the end."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _own_folder(self) -> Path:
        self.folder = Path(tempfile.mkdtemp(prefix="gradiometer-overhead-"))
        return self.folder


class Calls(Nothing):
    """A function of the gradients, called after each backward pass."""

    def __init__(
        self, parameters: list[nn.Parameter], function: Callable[[list[torch.Tensor]], object]
    ) -> None:
        super().__init__(parameters)
        self._timed = self.inside.around(function)

    def after_backward(self, loss: torch.Tensor) -> None:
        self._timed([parameter.grad for parameter in self.parameters if parameter.grad is not None])


class Ours(Nothing):
    """`gradiometer.init`, `run.watch` and `run.log` of the loss, offline: what is delivered later costs no step.

    Args:
        statistics: of `run.watch`.
        kernel: whether the native kernel may be used.
    """

    # The memory ledger counts all tensors at steps 1, 2, 4, 8, 16, and later once in 128 steps.
    num_early_steps = 17

    def __init__(
        self,
        parameters: list[nn.Parameter],
        *,
        statistics: str,
        kernel: bool = True,
        forward: bool | None = None,
    ) -> None:
        super().__init__(parameters)
        self._statistics, self._kernel, self._forward = statistics, kernel, forward
        self._run: gm.Run | None = None
        self._spool = self._own_folder()
        if kernel and native.load() is None:
            raise ImportError(f"no native kernel: {native.why_not()}")

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # Everything of the agent that runs in the training goes through its guard.
        # The hooks are many, and their first lines are outside the guard: they have a function of their own, so that
        # they are not charged for stopwatches inside stopwatches.
        self._unpatched = {name: getattr(Guard, name) for name in ("entered", "entered_tolerantly")}
        for name, function in self._unpatched.items():
            setattr(Guard, name, self._around_method(function))
        self._hook = _LeafHook.__call__
        _LeafHook.__call__ = self._around_method(self._hook)
        self._set_kernel(self._kernel)
        self._run = gm.init(project="benchmarks", mode="offline", spool=self._spool)
        self._run.watch(model, optimizer, statistics=self._statistics, forward=self._forward)

    def _around_method(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.inside.around(function)
        return lambda *args, **kwargs: timed(*args, **kwargs)

    def after_step(self, loss: torch.Tensor) -> None:
        assert self._run is not None
        self._run.log({"train/loss": loss})

    def detach(self) -> None:
        assert self._run is not None
        self._run.finish()
        assert not self._run.dropped, self._run.dropped
        assert not self._run.failures, self._run.failures
        self._set_kernel(True)
        for name, function in self._unpatched.items():
            setattr(Guard, name, function)
        _LeafHook.__call__ = self._hook

    @staticmethod
    def _set_kernel(wanted: bool) -> None:
        os.environ[native.VARIABLE] = "1" if wanted else "0"
        native._loaded.cache_clear()
        native.load()


class Wandb(Nothing):
    """`wandb.watch(log_freq=1)`, offline, and `run.log` of the loss."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        import wandb
        from wandb.integration.torch.wandb_torch import TorchHistory

        super().__init__(parameters)
        settings = wandb.Settings(x_disable_stats=True, console="off", silent=True)
        self._run = wandb.init(project="x", mode="offline", dir=str(self._own_folder()), settings=settings)
        self._history, self._model = TorchHistory, None
        self._log = self.inside.around(self._run.log)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._hook = self._history.log_tensor_stats
        timed = self.inside.around(self._hook)
        # Called in backward, on autograd's CPU thread, which for CPU tensors is the thread that called backward.
        self._history.log_tensor_stats = lambda *args, **kwargs: timed(*args, **kwargs)
        self._run.watch(model, log="gradients", log_freq=1)
        self._model = model

    def after_step(self, loss: torch.Tensor) -> None:
        self._log({"train/loss": loss.item()})

    def detach(self) -> None:
        self._run.unwatch(self._model)
        self._history.log_tensor_stats = self._hook

    def close(self) -> None:
        self._run.finish()
        super().close()


class TensorBoard(Nothing):
    """A histogram and the norm of every gradient, and the loss."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(parameters)
        self._writer = SummaryWriter(str(self._own_folder()))
        self._step = 0
        self._write_timed = self.inside.around(self._write)

    def after_backward(self, loss: torch.Tensor) -> None:
        self._write_timed(loss)

    def _write(self, loss: torch.Tensor) -> None:
        self._step += 1
        self._writer.add_scalar("train/loss", loss.item(), self._step)
        for index, parameter in enumerate(self.parameters):
            self._writer.add_histogram(f"gradient/{index}", parameter.grad, self._step)
            assert parameter.grad is not None
            self._writer.add_scalar(f"norm/{index}", parameter.grad.norm().item(), self._step)

    def close(self) -> None:
        self._writer.close()
        super().close()


class LightningNorm(Nothing):
    """Lightning's `grad_norm` utility, its values read as logging them would; it writes nothing."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        from lightning.pytorch.utilities import grad_norm

        super().__init__(parameters)
        self._model: nn.Module | None = None
        self._norms = self.inside.around(
            lambda: [value.item() for value in grad_norm(self._model, norm_type=2).values()]
        )

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model

    def after_backward(self, loss: torch.Tensor) -> None:
        self._norms()
