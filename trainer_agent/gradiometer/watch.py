"""Sees optimizer steps in every usual way of writing a training loop, and has each captured once.

The gradients of a step are read at the first of: clipping (before it changes them), the end of a closure,
`scaler.step`, the optimizer's step pre-hook. An optimizer's step ends at its post-hook, or, if the scaler skipped it
and no hook fired, when `scaler.step` returns; several optimizers watched together end a step together. Hooks per
parameter would be wrong: they fire per micro-batch, before DDP's reduction, and never under FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from gradiometer.capture import clip, forward, readback, scaling
from gradiometer.capture.clipped import ClippedNorm
from gradiometer.capture.clock import StepClock, StepNumbers
from gradiometer.capture.ending import StepEnding
from gradiometer.capture.gradients import GradientReader
from gradiometer.capture.layout import Layout, Places
from gradiometer.capture.numbers import Rates
from gradiometer.capture.observer import StepObserver, Watched, observers_of
from gradiometer.capture.optimizers import Optimizers, unwrap
from gradiometer.capture.progress import NextStep
from gradiometer.capture.reading import StepReading
from gradiometer.capture.stepping import StepCapture
from gradiometer.capture.tiers import EVERYTHING, Cadence, Tier
from gradiometer.guard import Guard
from gradiometer.histograms import HistogramDesk, Wishes
from gradiometer.reports import Report

ABANDONED: Final = "capture in a forked child"
IN_CUDA_GRAPH: Final = "the optimizer steps inside a CUDA graph, whose replays nobody can see: log with step="


class Watch:
    """Captures the steps of one optimizer, or of several that make one step together.

    Args:
        model: the module whose parameters the optimizers update.
        optimizers: already unwrapped.
        scaler: the GradScaler, or None.
        clock: the run's clock.
        is_clock: whether this watch's steps move the clock; see `clock.StepNumbers`.
        name: told apart from other watches by this; empty for the first.
        forward_probe: the user's wish; None: where it is known to be cheap.
        emit: takes a report; must not wait.
        unavailable: told a metric and why it cannot be collected; may be told again.
        sharded: parameters that differ from rank to rank though nothing in torch says so.
        checks: whether to make the exact checks.
        tier: which statistics are read how often.
        histograms: who wants histograms; None: nobody.
        histogram_every: also take one at each step whose number is a multiple of this.
        layouts: gives those of all watches of the run, as far as they are built.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Optimizers,
        scaler: Any,
        *,
        clock: StepClock,
        is_clock: bool,
        name: str,
        forward_probe: bool | None,
        emit: Callable[[Report], None],
        unavailable: Callable[[str, str], None],
        guard: Guard,
        sharded: Places | None = None,
        checks: bool = True,
        tier: Tier = EVERYTHING,
        histograms: HistogramDesk | None = None,
        histogram_every: int | None = None,
        layouts: Callable[[], Iterable[Layout]] = tuple,
    ) -> None:
        self._histograms, self._histogram_every = histograms, histogram_every
        self._layouts = layouts
        self._scaler = scaler if scaling.is_active(scaler) else None
        self._clock, self._is_clock, self._name = clock, is_clock, name
        self._emit, self._unavailable, self._guard = emit, unavailable, guard
        # Not the part of the reading, so that a step is still counted and timed where its gradients cannot be read.
        self._step_part = f"step capture{self._of}"
        self._prefix = f"{name}." if name else ""
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._probe = self._probe_of(model, forward_probe)
        self._indices = {id(optimizer): index for index, optimizer in enumerate(optimizers.all)}
        observers = observers_of(self._watched(model, optimizers, checks))
        self._capture = self._capture_of(model, optimizers, observers, sharded, tier)
        self._install(optimizers)

    @property
    def _of(self) -> str:
        return f" of {self._name}" if self._name else ""

    def _probe_of(self, model: torch.nn.Module, wish: bool | None) -> forward.ForwardProbe | None:
        reason = forward.why_not(model, wish)
        if reason is None:
            return forward.ForwardProbe(model, self._guard, self._prefix)
        self._unavailable("nonfinite_activation", reason)
        return None

    def _watched(self, model: torch.nn.Module, optimizers: Optimizers, checks: bool) -> Watched:
        return Watched(
            model=model,
            optimizer=optimizers.as_one,
            scaler=self._scaler,
            device=self._device,
            is_clock=self._is_clock,
            name=self._name,
            start_step=self._clock.start_step if self._clock.step == self._clock.start_step else 0,
            checks=checks,
            num_gradients=lambda: sum(reading.num_gradients for reading in self._capture.readings),
            emit=self._put,
            unavailable=self._unavailable,
            guard=self._guard,
        )

    def _capture_of(
        self,
        model: torch.nn.Module,
        optimizers: Optimizers,
        observers: list[StepObserver],
        sharded: Places | None,
        tier: Tier,
    ) -> StepCapture:
        numbers = StepNumbers(self._clock, is_clock=self._is_clock)
        cadence = Cadence(tier, numbers.coming)
        self._wishes = self._join_histograms(numbers)
        reader = self._reader = GradientReader(
            model,
            optimizers,
            self._prefix,
            self._unavailable,
            sharded,
            cadence,
            self._wishes,
            self._layouts,
        )
        is_only = len(optimizers.all) == 1
        clip_norm = ClippedNorm(self._unavailable)
        ending = StepEnding(
            scaler=self._scaler,
            probe=self._probe,
            guard=self._guard,
            rates=Rates(self._name, optimizers.names, self._unavailable),
            clip_norm=clip_norm,
            unavailable=self._unavailable,
            is_clock=self._is_clock,
            reads_rss=self._is_clock and self._device.type != "cuda",
        )
        return StepCapture(
            [StepReading(one, self._scaler, reader, self._guard, is_only=is_only) for one in optimizers.all],
            observers,
            part=f"gradient capture{self._of}",
            numbers=numbers,
            clip_norm=clip_norm,
            ending=ending,
            following=NextStep(tuple(model.parameters()), self._probe),
            enter=self._enter,
            emit=self._put,
            unavailable=self._unavailable,
            guard=self._guard,
        )

    def _join_histograms(self, numbers: StepNumbers) -> Wishes | None:
        if self._histograms is None:
            return None
        at_once = self._scaler is None
        return self._histograms.join(numbers.coming, every=self._histogram_every, at_once=at_once)

    def _install(self, optimizers: Optimizers) -> None:
        self._handles = []
        # Where `optimizer.step` is compiled the hooks must not be, or each of their branches makes a graph.
        uncompiled: Any = torch.compiler.disable
        pre_hook, post_hook = uncompiled(self._pre_hook), uncompiled(self._post_hook)
        for optimizer in optimizers.all:
            self._handles += [
                optimizer.register_step_pre_hook(pre_hook),
                optimizer.register_step_post_hook(post_hook),
            ]
        missed = clip.subscribe(self)
        if missed is not None:
            self._unavailable("grad/norm", missed)
        self._scaler_step = scaling.ScalerStep(self._scaler, self) if self._scaler is not None else None

    def _put(self, report: Report) -> None:
        self._emit(report)

    def close(self) -> None:
        """Leave model, optimizers, scaler and torch as they were before."""
        if self._capture.is_under_way:
            # An optimizer that was waited for had nothing to do in the last step.
            self._enter(self._capture.end_step)
        clip.unsubscribe(self)
        if self._histograms is not None and self._wishes is not None:
            self._histograms.leave(self._wishes)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._scaler_step is not None:
            self._scaler_step.remove()
        if self._probe is not None:
            self._probe.close()
        for observer in self.observers:
            self._guard.tolerate(observer.part, observer.close)
        self.observers.clear()
        self._capture.reset()

    def abandon(self) -> None:
        """In a forked child: see nothing more. The hooks stay, because the child may step an optimizer of its own."""
        self._emit = lambda _report: None
        self._step_part = ABANDONED
        self._guard.switch_off(ABANDONED)
        self.observers.clear()
        if self._probe is not None:
            self._probe.close()

    def _enter(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a piece of the capture: guarded, and on the agent's account."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Memory and events of ours would break the user's graph, and its replays run no Python.
            self._unavailable("grad/layers", IN_CUDA_GRAPH)
            return None
        return self._guard.entered(self._step_part, function, *args)

    # -- where a step is seen; what is done there is in `stepping` ---------------------------------------------------

    def before_clip(self, gradients: list[torch.Tensor]) -> None:
        """See `clip.ClipListener`."""
        self._enter(self._capture.before_clip, gradients)

    def after_clip(self, gradients: list[torch.Tensor], total_norm: torch.Tensor, over_ranks: bool) -> None:
        """See `clip.ClipListener`."""
        self._enter(self._capture.after_clip, gradients, total_norm, over_ranks)

    def after_change(self, limit: Any = None) -> None:
        """See `clip.ClipListener`."""
        self._enter(self._capture.after_change)

    def num_ended(self, optimizer: Any) -> int | None:
        """See `scaling.StepListener`."""
        index = self._index_of(optimizer)
        return None if index is None else self._capture.readings[index].num_ended

    def before_scaler_step(self, optimizer: Any) -> None:
        """See `scaling.StepListener`."""
        self._enter(self._capture.before_scaler_step, self._index_of(optimizer))

    def after_scaler_step(self, optimizer: Any, num_ended_before: int) -> None:
        """See `scaling.StepListener`."""
        index = self._index_of(optimizer)
        if index is not None and self._capture.readings[index].num_ended == num_ended_before:
            # No post-hook fired: an unfused optimizer whose step the scaler skipped.
            self._enter(self._capture.stepped, index, readback.KNOWN_ONE)

    def step_of_log(self) -> int:
        """The step that a value logged now belongs to: the one under way, else the last completed one."""
        begun = self._guard.call(self._step_part, self._capture.has_begun)
        return self._clock.step + (1 if begun else 0)

    @property
    def name(self) -> str:
        """Told apart from other watches by this."""
        return self._name

    @property
    def layout(self) -> Layout | None:
        """Its layers, from the first step on."""
        return self._reader.built

    @property
    def observers(self) -> list[StepObserver]:
        """All of them; empty once the watch has ended."""
        return self._capture.observers

    def is_for(self, optimizer: Any) -> bool:
        """Whether this watch follows `optimizer`, wrapped or not."""
        return self._index_of(optimizer) is not None

    def _index_of(self, optimizer: Any) -> int | None:
        index = self._indices.get(id(optimizer))
        return self._indices.get(id(unwrap(optimizer))) if index is None else index

    def _pre_hook(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        return self._enter(self._capture.before_step, self._indices[id(optimizer)], args, kwargs)

    def _post_hook(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._enter(self._capture.after_step, self._indices[id(optimizer)])
