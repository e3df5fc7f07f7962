"""The step under way of one watch: what is done when a clip, a closure, a scaler or an optimizer is seen.

Installs nothing and guards nothing but the reading itself: the watch calls every method here through its guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradiometer.capture import backward, clip
from gradiometer.capture.clipped import ClippedNorm
from gradiometer.capture.clock import StepNumbers
from gradiometer.capture.ending import StepEnding
from gradiometer.capture.observer import StepObserver, SteppingObserver
from gradiometer.capture.progress import NextStep
from gradiometer.capture.readback import Readback
from gradiometer.capture.reading import StepReading
from gradiometer.capture.together import Together
from gradiometer.guard import Guard
from gradiometer.reports import Report


class StepCapture:
    """Reads the gradients of a step once, and reports the step when it is complete.

    Args:
        part: of the guard, for the reading; switched off where it fails, while steps are still counted.
        numbers: of the watch's steps.
        ending: makes the report.
        following: tells whether the step after has begun.
        enter: runs a function as the watch runs the methods here: guarded, on the agent's account.
        emit: takes the report of a step; must not wait.
        unavailable: told a metric and why it cannot be collected; may be told again.

    Attributes:
        readings: one per optimizer.
        observers: told about the step; others may be added.
    """

    def __init__(
        self,
        readings: Sequence[StepReading],
        observers: list[StepObserver],
        *,
        part: str,
        numbers: StepNumbers,
        clip_norm: ClippedNorm,
        ending: StepEnding,
        following: NextStep,
        enter: Callable[..., Any],
        emit: Callable[[Report], None],
        unavailable: Callable[[str, str], None],
        guard: Guard,
    ) -> None:
        self.readings, self.observers = readings, observers
        self._stepping = [one for one in observers if isinstance(one, SteppingObserver)]
        self._part, self._numbers, self._clip_norm = part, numbers, clip_norm
        self._ending, self._next = ending, following
        self._enter, self._emit, self._unavailable, self._guard = enter, emit, unavailable, guard
        self._together = Together()
        self.reset()

    def reset(self) -> None:
        """Nothing of the next step was seen."""
        for reading in self.readings:
            reading.reset()
        self._clip_norm.forget()
        self._backward_tasks: set[int] = set()
        # The reading that was made first, or again.
        self._first: StepReading | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether some optimizers have stepped and others are waited for."""
        return self._together.is_under_way

    def has_begun(self) -> bool:
        """Whether the work for a step that is not complete was seen."""
        return self._together.is_under_way or self._next.has_begun()

    def before_clip(self, gradients: list[torch.Tensor]) -> None:
        """See `clip.ClipListener`."""
        ids = {id(gradient) for gradient in gradients}
        for index, reading in enumerate(self.readings):
            # Clipping twice or by groups: the first call reads everything, the others find it done.
            is_done = not reading.must_read()
            if not is_done and reading.owns_any(ids):
                if self._together.has_stepped(index):
                    self.end_step()
                self._read(reading)
                reading.expect_changes()
                is_done = reading.witness is not None
            reading.clips_what_was_read = is_done

    def after_clip(self, gradients: list[torch.Tensor], total_norm: Any, over_ranks: bool) -> None:
        """See `clip.ClipListener`."""
        self._clip_norm.see(self.readings, gradients, total_norm, over_ranks=over_ranks)

    def after_change(self) -> None:
        """See `clip.ClipListener`."""
        # Also where other gradients were clipped: those of one DDP bucket or FSDP1 unit count their changes together.
        for reading in self.readings:
            reading.accept_clip()

    def before_scaler_step(self, index: int) -> None:
        """`scaler.step` was called for this optimizer."""
        self._begin(index)
        self.readings[index].unscale_as_the_step_will()
        self._read_unless_done(self.readings[index])

    def before_step(self, index: int, args: Any, kwargs: Any) -> Any:
        """The optimizer is about to step; returns what a step pre-hook returns."""
        self._begin(index)
        reading = self.readings[index]
        reading.is_stepping = True
        if clip.was_compiled():
            self._unavailable("grad/clip_norm", clip.COMPILED)
        by_keyword = kwargs.get("closure") is not None
        closure: Any = kwargs["closure"] if by_keyword else args[1] if len(args) > 1 else None
        # The closure computes the gradients. Or it does nothing, as in Lightning's manual optimization: then what was
        # read before, at a clip, is of this step, and its witness says so.
        reading.in_closure = callable(closure)
        if not reading.in_closure:
            self._read_unless_done(reading)
            self._tell_stepping()
            return None
        self._tell_stepping()

        def observed(*closure_args: Any, **closure_kwargs: Any) -> Any:
            loss = closure(*closure_args, **closure_kwargs)
            self._enter(self._read_unless_done, reading)
            return loss

        if by_keyword:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _tell_stepping(self) -> None:
        for observer in self._stepping:
            self._guard.call(observer.part, observer.stepping)

    def _begin(self, index: int) -> None:
        """This optimizer is about to step: in the step under way, or in the next one."""
        task = backward.task()
        if self._together.begins_another(
            index, in_backward=task is not None, has_new_gradients=self._has_new_gradients
        ):
            self.end_step()
        if task is not None and task not in self._backward_tasks:
            self._backward_tasks.add(task)
            self._unavailable("grad/clip_norm", backward.PER_PARAMETER)
            backward.call_at_end(lambda: self._enter(self._after_backward))

    def _has_new_gradients(self) -> bool:
        return any(
            self._together.has_stepped(index) and reading.has_new_gradients()
            for index, reading in enumerate(self.readings)
        )

    def _after_backward(self) -> None:
        if not backward.is_nested() and self._together.backward_ended():
            self.end_step()

    def _read_unless_done(self, reading: StepReading) -> None:
        if reading.must_read():
            self._read(reading)

    # Hot path: training thread, once per step and optimizer.
    def _read(self, reading: StepReading) -> None:
        self._guard.call(self._part, self._capture, reading)

    def _capture(self, reading: StepReading) -> None:
        reading.forget_gradients()
        if self._first is None or self._first is reading:
            self._first = reading
            self._clip_norm.outdate()
            for observer in self.observers:
                self._guard.call(observer.part, observer.before_read)
        reading.read()

    def after_step(self, index: int) -> None:
        """The optimizer's step returned."""
        # An optimizer whose `step` calls the `step` of its base class fires the hooks of both.
        if self.readings[index].is_stepping:
            self.stepped(index, None)

    def stepped(self, index: int, skip: Readback | None) -> None:
        """The optimizer stepped; `skip`: not zero if the scaler left the step out."""
        in_backward = backward.task() is not None
        self.readings[index].end(skip)
        self._ending.see()
        for observer in self._stepping:
            self._guard.call(observer.part, observer.stepped, self._ending.at_s)
        if self._together.stepped(index, in_backward=in_backward, live=self._live):
            self.end_step()

    def _live(self) -> set[int]:
        return {index for index, reading in enumerate(self.readings) if not reading.is_frozen()}

    # Hot path: training thread, once per step.
    def end_step(self) -> None:
        """The step under way is complete: report it."""
        step, is_reported = self._numbers.next()
        report = self._ending.report(step, self.readings, self.observers)
        owners = [reading.witness.owner for reading in self.readings if reading.witness is not None]
        self._next.begin_after(min(owners, key=torch.Tensor.numel, default=None))
        self._together.complete()
        self.reset()
        if is_reported:
            self._emit(report)
