"""Decides when an optimizer step is complete, for every usual way of writing a training loop, and captures it once.

The state of a watch goes IDLE -> CAPTURED -> IDLE. The gradients of a step are read at the first of: clipping (before
it changes them), the end of a closure, `scaler.step`, the optimizer's step pre-hook. The step ends at the optimizer's
post-hook, or, if the scaler skipped it and no hook fired, when `scaler.step` returns. Hooks per parameter would be
wrong: they fire per micro-batch, before DDP's reduction, and never under FSDP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from gradiometer import wire
from gradiometer.capture import clip, forward, readback, scalars, scaling
from gradiometer.capture.gradients import GradientReader, Partials, Witness
from gradiometer.capture.layout import Places
from gradiometer.capture.observer import StepScalars, Watched, observers_of
from gradiometer.capture.progress import NextStep
from gradiometer.capture.readback import KnownReadback, Readback
from gradiometer.guard import Guard
from gradiometer.reports import Report, StepReport

_MAX_WRAPPERS: Final = 8
ABANDONED: Final = "capture in a forked child"


class StepClock:
    """Counts optimizer steps, skipped ones included.

    Args:
        start_step: steps completed before this process; the next one is `start_step + 1`.
    """

    def __init__(self, start_step: int) -> None:
        self.step = start_step

    def advance(self) -> int:
        """Another step is complete: its number."""
        self.step += 1
        return self.step


class Watch:
    """Captures the steps of one optimizer.

    Args:
        model: the module whose parameters the optimizer updates.
        optimizer: a `torch.optim.Optimizer`, already unwrapped.
        scaler: the GradScaler, or None.
        clock: the run's clock.
        is_clock: whether this optimizer's steps move the clock. Another watch reports under the last completed
            step of the clock, at most once per step.
        name: told apart from other watches by this; empty for the first.
        forward_probe: the user's wish; None: where it is known to be cheap.
        emit: takes a report; must not wait.
        unavailable: told a metric and why it cannot be collected; may be told again.
        sharded: parameters that differ from rank to rank though nothing in torch says so.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
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
    ) -> None:
        self._optimizer = optimizer
        self._scaler = scaler if scaling.is_active(scaler) else None
        self._clock, self._is_clock, self._name = clock, is_clock, name
        self._emit, self._unavailable, self._guard = emit, unavailable, guard
        suffix = f" of {name}" if name else ""
        # Two parts, so that a step is still counted and timed where its gradients cannot be read.
        self._capture_part = f"gradient capture{suffix}"
        self._step_part = f"step capture{suffix}"
        prefix = f"{name}." if name else ""
        self._reader = GradientReader(model, optimizer, prefix, unavailable, sharded)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._reset()
        self._spent_s = 0.0
        self._ended_s: float | None = None
        self._num_ended = 0
        self._reported_step: int | None = None
        self._probe: forward.ForwardProbe | None = None
        self._install(model, forward_probe, prefix)
        self._next = NextStep(tuple(model.parameters()), self._probe)

    def _reset(self) -> None:
        self._partials: Partials | None = None
        self._scale: Readback | None = None
        self._clip_norm: torch.Tensor | None = None
        self._in_closure = False
        # The smallest gradient that was read, kept until the step ends.
        self._witness: Witness | None = None
        self._clips_what_was_read = False
        self._num_gradients = 0

    def _install(self, model: torch.nn.Module, forward_probe: bool | None, prefix: str) -> None:
        self._handles = [
            self._optimizer.register_step_pre_hook(self._pre_hook),
            self._optimizer.register_step_post_hook(self._post_hook),
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
            optimizer=self._optimizer,
            scaler=self._scaler,
            device=self._device,
            is_clock=self._is_clock,
            name=self._name,
            emit=self._put,
            unavailable=self._unavailable,
            guard=self._guard,
        )
        self._observers = observers_of(watched)

    def _put(self, report: Report) -> None:
        self._emit(report)

    def close(self) -> None:
        """Leave model, optimizer, scaler and torch as they were before."""
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
        started_s = time.perf_counter()
        result = self._guard.call(self._step_part, function, *args)
        self._spent_s += time.perf_counter() - started_s
        return result

    # -- where a step is seen ------------------------------------------------------------------------------------

    def before_clip(self, gradients: list[torch.Tensor]) -> None:
        """See `clip.ClipListener`."""
        self._enter(self._before_clip, gradients)

    def after_clip(self, gradients: list[torch.Tensor], total_norm: torch.Tensor, over_ranks: bool) -> None:
        """See `clip.ClipListener`."""
        self._enter(self._after_clip, gradients, total_norm, over_ranks)

    def after_change(self) -> None:
        """See `clip.ClipListener`."""
        self._enter(self._after_change)

    def before_scaler_step(self) -> None:
        """`scaler.step` was called for this optimizer."""
        self._enter(self._before_scaler_step)

    def after_scaler_step(self, num_ended_before: int) -> None:
        """`scaler.step` returned; `num_ended_before` is `num_ended` as it was when it was called."""
        if self._num_ended == num_ended_before:
            # No post-hook fired: an unfused optimizer whose step the scaler skipped.
            self._enter(self._end_step, KnownReadback(np.array([1.0])))

    def step_of_log(self) -> int:
        """The step that a value logged now belongs to: the one under way, else the last completed one."""
        begun = self._guard.call(self._step_part, self._next.has_begun)
        return self._clock.step + (1 if begun else 0)

    @property
    def num_ended(self) -> int:
        """Steps seen so far."""
        return self._num_ended

    def is_for(self, optimizer: Any) -> bool:
        """Whether this watch follows `optimizer`, wrapped or not."""
        return optimizer is self._optimizer or unwrap_optimizer(optimizer) is self._optimizer

    def _pre_hook(self, _optimizer: Any, args: Any, kwargs: Any) -> Any:
        return self._enter(self._before_step, args, kwargs)

    def _post_hook(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._enter(self._end_step, None)

    # -- what is done there --------------------------------------------------------------------------------------

    def _before_clip(self, gradients: list[torch.Tensor]) -> None:
        # Clipping twice or by groups: the first call reads everything, the others find it done.
        if self._must_read() and self._owns_any(gradients):
            self._guard.call(self._capture_part, self._capture)
        self._clips_what_was_read = not self._must_read()

    def _owns_any(self, gradients: list[torch.Tensor]) -> bool:
        ids = {id(gradient) for gradient in gradients}
        return any(owner.grad is not None and id(owner.grad) in ids for owner in self._reader.layout.owners)

    def _after_clip(self, gradients: list[torch.Tensor], total_norm: Any, over_ranks: bool) -> None:
        # A norm of some of the gradients is not this step's norm.
        if self._partials is None or len(gradients) != self._num_gradients or self._witness is None:
            return
        if self._partials.layout.has_plain_shards and not over_ranks:
            self._unavailable("grad/clip_norm", clip.OWN_SHARD)
        elif any(gradient is self._witness.gradient for gradient in gradients):
            self._clip_norm = scalars.local_scalar(total_norm)

    def _after_change(self) -> None:
        # Also where other gradients were clipped: those of one DDP bucket or FSDP1 unit count their changes together.
        if self._clips_what_was_read and self._witness is not None:
            self._witness.accept()

    def _before_scaler_step(self) -> None:
        scaler: Any = self._scaler
        optimizer = self._optimizer
        is_scaled = scaling.stage_of(scaler, optimizer) == "READY" and scaling.has_scaled(scaler)
        if is_scaled and not scaling.unscales_itself(optimizer):
            # What scaler.step is about to do; done here, the capture sees the same gradients as the optimizer
            # even in a step that is skipped, when no hook fires.
            scaler.unscale_(optimizer)
        self._capture_unless_done()

    def _before_step(self, args: Any, kwargs: Any) -> Any:
        by_keyword = kwargs.get("closure") is not None
        closure = kwargs["closure"] if by_keyword else args[1] if len(args) > 1 else None
        if not callable(closure):
            self._capture_unless_done()
            return None
        # The closure computes the gradients, so what is there now belongs to the step before.
        self._reset()
        self._in_closure = True

        def observed(*closure_args: Any, **closure_kwargs: Any) -> Any:
            loss = closure(*closure_args, **closure_kwargs)
            self._enter(self._capture_unless_done)
            return loss

        if by_keyword:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _capture_unless_done(self) -> None:
        if self._must_read():
            self._guard.call(self._capture_part, self._capture)

    def _must_read(self) -> bool:
        """Whether nothing was read, or not the gradients that are there now.

        The latter where a loop measures the norm of every micro-batch, or clips and leaves out `optimizer.step()`.
        """
        if self._partials is None:
            return True
        if self._in_closure:
            # LBFGS evaluates its closure many times per step; the first gradient is the one at the step's start.
            return False
        return self._witness is None or self._witness.is_outdated()

    # Hot path: training thread, once per step.
    def _capture(self) -> None:
        in_closure = self._in_closure
        self._reset()
        self._in_closure = in_closure
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._unavailable("grad/layers", "the optimizer step runs inside a CUDA graph")
            return
        for observer in self._observers:
            self._guard.call(observer.part, observer.before_read)
        scale = self._current_scale()
        self._scale = None if scale is None else readback.start(readback.pack([scale]))
        self._partials = self._reader.read()
        owners = [owner for owner in self._partials.layout.owners if owner.grad is not None]
        self._num_gradients = len(owners)
        if owners:
            self._witness = Witness(min(owners, key=torch.Tensor.numel))

    def _current_scale(self) -> torch.Tensor | None:
        """What the gradients are multiplied by right now; None for 1."""
        inside_fused_step = scaling.grad_scale_of(self._optimizer)
        if inside_fused_step is not None:
            return inside_fused_step
        if self._scaler is not None and scaling.stage_of(self._scaler, self._optimizer) == "READY":
            return scaling.scale_of(self._scaler)
        return None

    # Hot path: training thread, once per step.
    def _end_step(self, skip: Readback | None) -> None:
        self._num_ended += 1
        now_s = time.perf_counter()
        step = self._clock.advance() if self._is_clock else self._clock.step
        probe = self._probe
        report = StepReport(
            step=step,
            time=time.time(),
            partials=self._partials,
            scale=self._scale,
            skip=skip if skip is not None else self._skip_of_fused_step(),
            forward=None if probe is None else self._guard.call("forward probe", probe.take),
            scalars=scalars.collect([*self._scalars(step), *self._times(now_s)]),
            reads_rss=self._is_clock and self._device.type != "cuda",
        )
        self._ended_s = now_s
        self._next.begin_after(None if self._witness is None else self._witness.owner)
        self._reset()
        if self._is_clock or step != self._reported_step:
            self._reported_step = step
            self._emit(report)

    def _skip_of_fused_step(self) -> Readback | None:
        found_inf = scaling.found_inf_of(self._optimizer)
        if found_inf is not None:
            return readback.start(readback.pack([found_inf]))
        return KnownReadback(np.array([0.0])) if self._scaler is not None else None

    def _scalars(self, step: int) -> StepScalars:
        base = f"train/lr/{self._name}" if self._name else "train/lr"
        values: list[tuple[wire.Column, float | torch.Tensor]] = []
        for index, group in enumerate(self._optimizer.param_groups):
            rate = group.get("lr")
            if rate is not None:
                name = base if index == 0 else f"{base}/group{index}"
                values.append((wire.Column(name), rate if isinstance(rate, torch.Tensor) else float(rate)))
        for observer in self._observers:
            values += self._guard.call(observer.part, observer.end_step, step) or ()
        if not self._is_clock:
            return values
        scale = scaling.scale_of(self._scaler) if self._scaler is not None else None
        if scale is not None:
            values.append((wire.Column("scaler/scale"), scale))
        if self._clip_norm is not None:
            values.append((wire.Column("grad/clip_norm"), self._clip_norm))
        return values

    def _times(self, now_s: float) -> StepScalars:
        if not self._is_clock:
            return ()
        spent_s, self._spent_s = self._spent_s, 0.0
        if self._probe is not None:
            spent_s += self._probe.spent_s
            self._probe.spent_s = 0.0
        times: list[tuple[wire.Column, float | torch.Tensor]] = []
        if self._ended_s is not None:
            times.append((wire.Column("time/step_s", "max"), now_s - self._ended_s))
        # The end of this very report is booked on the next step.
        return [*times, (wire.Column("agent/step_s", "max"), spent_s + time.perf_counter() - now_s)]


def unwrap_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside Accelerate's, Lightning's and similar wrappers, which have no hooks of their own."""
    found = candidate = optimizer
    for _ in range(_MAX_WRAPPERS):
        # Not `or`: a wrapper may define its own truth value.
        candidate = getattr(candidate, "optimizer", getattr(candidate, "_optimizer", None))
        if candidate is None:
            break
        found = candidate if isinstance(candidate, torch.optim.Optimizer) else found
    return found
