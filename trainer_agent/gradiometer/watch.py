"""Decides when an optimizer step is complete, for every usual way of writing a training loop, and captures it once.

The gradients of a step are read at the first of: clipping (before it changes them), the end of a closure,
`scaler.step`, the optimizer's step pre-hook. An optimizer's step ends at its post-hook, or, if the scaler skipped it
and no hook fired, when `scaler.step` returns; several optimizers watched together end a step together. Hooks per
parameter would be wrong: they fire per micro-batch, before DDP's reduction, and never under FSDP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from gradiometer.capture import backward, clip, forward, gradients, readback, scaling
from gradiometer.capture.clipped import ClippedNorm
from gradiometer.capture.clock import StepClock, StepNumbers
from gradiometer.capture.ending import StepEnding
from gradiometer.capture.layout import Places
from gradiometer.capture.numbers import Rates
from gradiometer.capture.observer import StepObserver, Watched, observers_of
from gradiometer.capture.optimizers import Optimizers, unwrap
from gradiometer.capture.progress import NextStep
from gradiometer.capture.readback import Readback
from gradiometer.capture.reading import StepReading
from gradiometer.capture.tiers import EVERYTHING, Cadence, Tier
from gradiometer.capture.together import Together
from gradiometer.guard import Guard
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
    ) -> None:
        self._scaler = scaler if scaling.is_active(scaler) else None
        self._clock, self._is_clock, self._name = clock, is_clock, name
        self._emit, self._unavailable, self._guard = emit, unavailable, guard
        suffix = f" of {name}" if name else ""
        # Two parts, so that a step is still counted and timed where its gradients cannot be read.
        self._capture_part = f"gradient capture{suffix}"
        self._step_part = f"step capture{suffix}"
        prefix = f"{name}." if name else ""
        self._numbers = StepNumbers(clock, is_clock=is_clock)
        cadence = Cadence(tier, self._numbers.coming)
        reader = gradients.GradientReader(model, optimizers, prefix, unavailable, sharded, cadence)
        is_only = len(optimizers.all) == 1
        self._readings = tuple(
            StepReading(one, self._scaler, reader, guard, is_only=is_only) for one in optimizers.all
        )
        self._indices = {id(optimizer): index for index, optimizer in enumerate(optimizers.all)}
        self._together = Together()
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._clip_norm = ClippedNorm(unavailable)
        self._probe: forward.ForwardProbe | None = None
        self._reset()
        self._install(model, optimizers, forward_probe, prefix, checks)
        self._next = NextStep(tuple(model.parameters()), self._probe)
        self._ending = StepEnding(
            scaler=self._scaler,
            probe=self._probe,
            guard=guard,
            rates=Rates(name, optimizers.names, unavailable),
            clip_norm=self._clip_norm,
            unavailable=unavailable,
            is_clock=is_clock,
            reads_rss=is_clock and self._device.type != "cuda",
        )

    def _reset(self) -> None:
        for reading in self._readings:
            reading.reset()
        self._clip_norm.forget()
        self._backward_tasks: set[int] = set()

    def _install(
        self,
        model: torch.nn.Module,
        optimizers: Optimizers,
        forward_probe: bool | None,
        prefix: str,
        checks: bool,
    ) -> None:
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
        reason = forward.why_not(model, forward_probe)
        if reason is None:
            self._probe = forward.ForwardProbe(model, self._guard, prefix)
        else:
            self._unavailable("nonfinite_activation", reason)
        watched = Watched(
            model=model,
            optimizer=optimizers.as_one,
            scaler=self._scaler,
            device=self._device,
            is_clock=self._is_clock,
            name=self._name,
            start_step=self._clock.start_step if self._clock.step == self._clock.start_step else 0,
            checks=checks,
            emit=self._put,
            unavailable=self._unavailable,
            guard=self._guard,
        )
        self._observers = observers_of(watched)

    def _put(self, report: Report) -> None:
        self._emit(report)

    def close(self) -> None:
        """Leave model, optimizers, scaler and torch as they were before."""
        if self._together.is_under_way:
            # An optimizer that was waited for had nothing to do in the last step.
            self._enter(self._end_step)
        clip.unsubscribe(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._scaler_step is not None:
            self._scaler_step.remove()
        if self._probe is not None:
            self._probe.close()
        for observer in self._observers:
            self._guard.tolerate(observer.part, observer.close)
        self._observers = []
        self._reset()

    def abandon(self) -> None:
        """In a forked child: see nothing more. The hooks stay, because the child may step an optimizer of its own."""
        self._emit = lambda _report: None
        self._capture_part = self._step_part = ABANDONED
        self._guard.switch_off(ABANDONED)
        self._observers = []
        if self._probe is not None:
            self._probe.close()

    def _enter(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a piece of the capture: guarded, and on the agent's account."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Memory and events of ours would break the user's graph, and its replays run no Python.
            self._unavailable("grad/layers", IN_CUDA_GRAPH)
            return None
        return self._guard.entered(self._step_part, function, *args)

    # -- where a step is seen ------------------------------------------------------------------------------------

    def before_clip(self, gradients: list[torch.Tensor]) -> None:
        """See `clip.ClipListener`."""
        self._enter(self._before_clip, gradients)

    def after_clip(self, gradients: list[torch.Tensor], total_norm: torch.Tensor, over_ranks: bool) -> None:
        """See `clip.ClipListener`."""
        self._enter(self._after_clip, gradients, total_norm, over_ranks)

    def after_change(self, limit: Any = None) -> None:
        """See `clip.ClipListener`."""
        self._enter(self._after_change)

    def num_ended(self, optimizer: Any) -> int | None:
        """See `scaling.StepListener`."""
        index = self._index_of(optimizer)
        return None if index is None else self._readings[index].num_ended

    def before_scaler_step(self, optimizer: Any) -> None:
        """See `scaling.StepListener`."""
        self._enter(self._before_scaler_step, self._index_of(optimizer))

    def after_scaler_step(self, optimizer: Any, num_ended_before: int) -> None:
        """See `scaling.StepListener`."""
        index = self._index_of(optimizer)
        if index is not None and self._readings[index].num_ended == num_ended_before:
            # No post-hook fired: an unfused optimizer whose step the scaler skipped.
            self._enter(self._stepped, index, readback.KNOWN_ONE)

    def step_of_log(self) -> int:
        """The step that a value logged now belongs to: the one under way, else the last completed one."""
        begun = self._together.is_under_way or self._guard.call(self._step_part, self._next.has_begun)
        return self._clock.step + (1 if begun else 0)

    @property
    def observers(self) -> list[StepObserver]:
        """All of them; empty once the watch has ended."""
        return self._observers

    def is_for(self, optimizer: Any) -> bool:
        """Whether this watch follows `optimizer`, wrapped or not."""
        return self._index_of(optimizer) is not None

    def _index_of(self, optimizer: Any) -> int | None:
        index = self._indices.get(id(optimizer))
        return self._indices.get(id(unwrap(optimizer))) if index is None else index

    def _pre_hook(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        return self._enter(self._before_step, optimizer, args, kwargs)

    def _post_hook(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._enter(self._after_step, optimizer)

    # -- what is done there --------------------------------------------------------------------------------------

    def _before_clip(self, gradients: list[torch.Tensor]) -> None:
        ids = {id(gradient) for gradient in gradients}
        for index, reading in enumerate(self._readings):
            # Clipping twice or by groups: the first call reads everything, the others find it done.
            if reading.must_read() and reading.owns_any(ids):
                if self._together.has_stepped(index):
                    self._end_step()
                self._read(reading)
            reading.clips_what_was_read = not reading.must_read()

    def _after_clip(self, gradients: list[torch.Tensor], total_norm: Any, over_ranks: bool) -> None:
        self._clip_norm.see(self._readings, gradients, total_norm, over_ranks=over_ranks)

    def _after_change(self) -> None:
        # Also where other gradients were clipped: those of one DDP bucket or FSDP1 unit count their changes together.
        for reading in self._readings:
            if reading.clips_what_was_read and reading.witness is not None:
                reading.witness.accept()

    def _before_scaler_step(self, index: int) -> None:
        self._begin(index)
        self._readings[index].unscale_as_the_step_will()
        self._read_unless_done(self._readings[index])

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        index = self._indices[id(optimizer)]
        self._begin(index)
        reading = self._readings[index]
        reading.is_stepping = True
        if clip.was_compiled():
            self._unavailable("grad/clip_norm", clip.COMPILED)
        by_keyword = kwargs.get("closure") is not None
        closure = kwargs["closure"] if by_keyword else args[1] if len(args) > 1 else None
        if not callable(closure):
            self._read_unless_done(reading)
            return None
        # The closure computes the gradients. Or it does nothing, as in Lightning's manual optimization: then what was
        # read before, at a clip, is of this step, and its witness says so.
        reading.in_closure = True

        def observed(*closure_args: Any, **closure_kwargs: Any) -> Any:
            loss = closure(*closure_args, **closure_kwargs)
            self._enter(self._read_unless_done, reading)
            return loss

        if by_keyword:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _begin(self, index: int) -> None:
        """This optimizer is about to step: in the step under way, or in the next one."""
        task = backward.task()
        if self._together.begins_another(
            index, in_backward=task is not None, has_new_gradients=self._has_new_gradients
        ):
            self._end_step()
        if task is not None and task not in self._backward_tasks:
            self._backward_tasks.add(task)
            self._unavailable("grad/clip_norm", backward.PER_PARAMETER)
            backward.call_at_end(lambda: self._enter(self._after_backward))

    def _has_new_gradients(self) -> bool:
        return any(
            self._together.has_stepped(index) and reading.has_new_gradients()
            for index, reading in enumerate(self._readings)
        )

    def _after_backward(self) -> None:
        if not backward.is_nested() and self._together.backward_ended():
            self._end_step()

    def _read_unless_done(self, reading: StepReading) -> None:
        if reading.must_read():
            self._read(reading)

    # Hot path: training thread, once per step and optimizer.
    def _read(self, reading: StepReading) -> None:
        self._guard.call(self._capture_part, self._capture, reading)

    def _capture(self, reading: StepReading) -> None:
        reading.forget_gradients()
        if all(other.partials is None for other in self._readings):
            self._clip_norm.forget()
            for observer in self._observers:
                self._guard.call(observer.part, observer.before_read)
        reading.read()

    def _after_step(self, optimizer: Any) -> None:
        index = self._indices[id(optimizer)]
        # An optimizer whose `step` calls the `step` of its base class fires the hooks of both.
        if self._readings[index].is_stepping:
            self._stepped(index, None)

    def _stepped(self, index: int, skip: Readback | None) -> None:
        in_backward = backward.task() is not None
        self._readings[index].end(skip)
        self._ending.see()
        if self._together.stepped(index, in_backward=in_backward, live=self._live):
            self._end_step()

    def _live(self) -> set[int]:
        return {index for index, reading in enumerate(self._readings) if not reading.is_frozen()}

    # Hot path: training thread, once per step.
    def _end_step(self) -> None:
        step, is_reported = self._numbers.next()
        report = self._ending.report(step, self._readings, self._observers)
        owners = [reading.witness.owner for reading in self._readings if reading.witness is not None]
        self._next.begin_after(min(owners, key=torch.Tensor.numel, default=None))
        self._together.complete()
        self._reset()
        if is_reported:
            self._emit(report)
