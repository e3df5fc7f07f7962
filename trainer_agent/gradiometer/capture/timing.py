"""The time ledger: how much of a step is waiting for data, forward, backward, the optimizer, and the rest.

At every moment the innermost phase counts: a forward pass inside an optimizer's closure is forward, one that activation
checkpointing repeats inside the backward pass is backward. Whatever is in no phase (the loss between forward and backward,
clipping, logging, evaluation, the agent itself) is `time/other_s`, so that the five add up to the step. On the CPU
the host's clock is read; on CUDA events are recorded at the same places, and the agent's thread reads them later.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Final

import torch

from gradiometer import wire
from gradiometer.capture import backward, device_time, loop_calls, scripting
from gradiometer.capture.observer import StepScalars, Watched
from gradiometer.guard import Guard
from gradiometer.phases import BACKWARD, DATA_WAIT, FORWARD, NAMES, OPTIMIZER

TELL_AFTER: Final = 10
"""Steps without a phase, after which it is said that the phase is not seen."""
HOST_WAIT: Final = "time/data_wait_host_s"
DEVICE_STEP: Final = "time/device_step_s"
OTHER: Final = "time/other_s"
_UNSEEN: Final = {
    DATA_WAIT: "no torch DataLoader was iterated by the training thread; wrap another loader: for batch in "
    "run.data(loader)",
    FORWARD: "the watched model itself was not called in training mode, or only inside a compiled function, where "
    "nothing can look on without breaking its graph: its forward pass is part of time/other_s",
    BACKWARD: "torch.autograd.backward was not called, or only under a name that was imported before watch(): the "
    "backward pass is part of time/other_s",
    OPTIMIZER: "no optimizer step was seen",
}
_COMPILED: Final = "the model was compiled in place: a hook on it would be compiled too, so its forward pass is part of time/other_s"


class _PhaseHook:
    """A forward hook or pre-hook that a copy or a pickle of the model leaves behind."""

    __slots__ = ("_tell",)

    def __init__(self, tell: Any) -> None:
        self._tell = tell

    # Hot path: training thread, once per forward pass. Must return None and change nothing. While torch.compile traces,
    # the test is a constant, so that nothing of it is in a graph.
    def __call__(self, module: torch.nn.Module, *_args: Any) -> None:
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self._tell(FORWARD)

    def __reduce__(self) -> tuple[Any, ...]:
        # As in `forward`: something that takes what a hook takes and returns None, wherever the model is loaded.
        return (getattr, (contextlib.nullcontext(), "__exit__"))

    def __deepcopy__(self, _memo: Any) -> Any:
        return scripting.LeftBehind()


class HostPhases:
    """Adds up seconds of the host's clock by phase, without the agent's own.

    Attributes:
        totals: seconds in each phase so far.
        stack: the phases that the training is in, the innermost last.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.totals = [0.0] * len(NAMES)
        self.stack: list[int] = []
        self._last_s, self._last_agent_s = 0.0, 0.0

    # Hot path: training thread, at the beginning and end of every phase.
    def mark(self, now_s: float) -> None:
        """The time since the last mark belongs to the phase that the training was in."""
        agent_s = self._guard.agent_s(now_s)
        if self.stack:
            own_s = (now_s - self._last_s) - (agent_s - self._last_agent_s)
            self.totals[self.stack[-1]] += max(0.0, own_s)
        self._last_s, self._last_agent_s = now_s, agent_s


class TimeLedger:
    """Follows the training thread through its phases."""

    part = "time ledger"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._host = HostPhases(watched.guard)
        self._device = device_time.DevicePhases(watched.device) if watched.device.type == "cuda" else None
        self._thread = threading.get_ident()
        self._counts = [0] * len(NAMES)
        # Time and totals when an optimizer last stepped, and when the last step ended.
        self._stepped: tuple[float, list[float]] | None = None
        self._before: tuple[float, list[float]] | None = None
        self._num_steps = 0
        self._handles: list[Any] = []
        self._hook(watched.model)
        loop_calls.subscribe(self)

    def _hook(self, model: torch.nn.Module) -> None:
        if getattr(model, "_compiled_call_impl", None) is not None:
            self._watched.unavailable("time/forward_s", _COMPILED)
            return
        if isinstance(model, torch.jit.ScriptModule):
            return
        scripting.hide(self, _PhaseHook)
        self._handles = [
            model.register_forward_pre_hook(_PhaseHook(self._begin_forward), prepend=True),
            model.register_forward_hook(_PhaseHook(self.end), always_call=True),
        ]

    def _begin_forward(self, phase: int) -> None:
        # Activation checkpointing repeats forward passes inside the backward pass.
        if backward.task() is None:
            self.begin(phase)

    def begin(self, phase: int) -> None:
        """See `phases.PhaseListener`."""
        # A thread that fetches batches ahead is not the training.
        if threading.get_ident() == self._thread:
            self._watched.guard.entered(self.part, self._begin, phase)

    def end(self, phase: int) -> None:
        """See `phases.PhaseListener`."""
        if threading.get_ident() == self._thread:
            self._watched.guard.entered(self.part, self._end, phase)

    def _begin(self, phase: int) -> None:
        self._mark(time.perf_counter())
        self._counts[phase] += 1
        self._host.stack.append(phase)
        self._begin_on_device()

    def _end(self, phase: int) -> None:
        stack = self._host.stack
        if phase not in stack:
            return
        self._mark(time.perf_counter())
        # With whatever did not end inside it, because an exception ended it.
        while stack.pop() != phase:
            pass
        self._begin_on_device()

    def _mark(self, now_s: float) -> None:
        self._host.mark(now_s)

    def _begin_on_device(self) -> None:
        if self._device is not None:
            self._device.mark(self._host.stack[-1] if self._host.stack else None)

    def stepping(self) -> None:
        """See `SteppingObserver`."""
        if OPTIMIZER in self._host.stack:
            # The last one raised.
            self._end(OPTIMIZER)
        self._begin(OPTIMIZER)

    def stepped(self, at_s: float) -> None:
        """See `SteppingObserver`."""
        self._mark(at_s)
        stack = self._host.stack
        if OPTIMIZER in stack:
            while stack.pop() != OPTIMIZER:
                pass
        if backward.task() is None:
            self._thread = threading.get_ident()
        self._stepped = (at_s, list(self._host.totals))
        if self._device is not None:
            self._device.step(self._host.stack[-1] if self._host.stack else None)

    def before_read(self) -> None:
        """See `StepObserver`."""

    # Hot path: training thread, once per step.
    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        self._num_steps += 1
        if self._num_steps == TELL_AFTER:
            self._tell_unseen()
        before, self._before = self._before, self._stepped
        marks = self._device.end_step() if self._device is not None else None
        if before is None or self._stepped is None or self._stepped[0] <= before[0]:
            return ()
        at_s, totals = self._stepped
        spent_s = [now - then for now, then in zip(totals, before[1], strict=True)]
        if self._device is None:
            return self._of_host(at_s - before[0], spent_s)
        if marks is not None:
            self._watched.emit(device_time.report(step, time.time(), marks, self._seen()))
        return [(wire.Column(HOST_WAIT), spent_s[DATA_WAIT])] if self._counts[DATA_WAIT] else ()

    def _seen(self) -> list[int]:
        return [phase for phase, count in enumerate(self._counts) if count]

    def _of_host(self, step_s: float, spent_s: list[float]) -> StepScalars:
        found = [(wire.Column(f"time/{NAMES[phase]}_s"), spent_s[phase]) for phase in self._seen()]
        return [*found, (wire.Column(OTHER), step_s - sum(value for _, value in found))]

    def _tell_unseen(self) -> None:
        for phase, reason in _UNSEEN.items():
            if not self._counts[phase]:
                self._watched.unavailable(f"time/{NAMES[phase]}_s", reason)

    def close(self) -> None:
        """See `StepObserver`."""
        loop_calls.unsubscribe(self)
        scripting.show(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
