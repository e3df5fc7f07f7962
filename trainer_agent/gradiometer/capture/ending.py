"""Puts together the report of a step that is complete, as things were when its last optimizer stepped.

With several optimizers it may turn out only later that none is to come: by then the scheduler has changed the
learning rate, the scaler its scale, and the next forward pass has run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from gradiometer import wire
from gradiometer.capture import forward, gradients, readback, scalars, scaling
from gradiometer.capture.clipped import ClippedNorm
from gradiometer.capture.numbers import Rates, Times
from gradiometer.capture.observer import StepObserver, StepScalars
from gradiometer.capture.reading import StepReading
from gradiometer.guard import Guard
from gradiometer.reports import StepReport

EMPTY_STEPS: Final = 3
"""Steps in a row without any gradient, after which it is no accident."""
NO_GRADIENTS: Final = (
    f"in {EMPTY_STEPS} steps no parameter had a gradient when the optimizer stepped: either backward() is not called, or "
    "a framework keeps the gradients elsewhere (DeepSpeed's ZeRO, Megatron's main_grad), where they are not found"
)


class StepEnding:
    """The end of the step under way of one watch.

    Args:
        unavailable: told if there never are gradients.
        probe: the forward probe, where there is one.
        is_clock: whether the run's own numbers (times, scale, memory) belong to this watch.
        reads_rss: see `StepReport`.

    Attributes:
        at_s: when an optimizer last stepped, of `time.perf_counter`.
    """

    def __init__(
        self,
        *,
        scaler: Any,
        probe: forward.ForwardProbe | None,
        guard: Guard,
        rates: Rates,
        clip_norm: ClippedNorm,
        unavailable: Callable[[str, str], None],
        is_clock: bool,
        reads_rss: bool,
    ) -> None:
        self._scaler, self._probe, self._guard = scaler, probe, guard
        self._rates, self._clip_norm, self._times = rates, clip_norm, Times(guard)
        self._is_clock, self._reads_rss = is_clock, reads_rss
        self._unavailable = unavailable
        self.at_s = 0.0
        self._forwards: list[forward.ForwardReport] = []
        self._num_empty = 0

    # Hot path: training thread, once per step and optimizer. Must not read the scale.
    def see(self) -> None:
        """An optimizer stepped, or was skipped: keep what is true now."""
        self.at_s, self._time = time.perf_counter(), time.time()
        self._scale = scaling.scale_of(self._scaler) if self._scaler is not None else None
        if self._probe is not None:
            seen = self._guard.call("forward probe", self._probe.take)
            if seen is not None:
                self._forwards.append(seen)

    # Hot path: training thread, once per step.
    def report(
        self, step: int, readings: Sequence[StepReading], observers: Sequence[StepObserver]
    ) -> StepReport:
        """The report of `step`, which ended with the last `see`."""
        partials, scale = gradients.combine(
            [(reading.partials, reading.scale) for reading in readings if reading.partials is not None]
        )
        self._look_for_gradients(readings)
        forwards, self._forwards = self._forwards, []
        values = [*self._rates.of(readings), *self._observed(step, observers), *self._own()]
        return StepReport(
            step=step,
            time=self._time,
            partials=partials,
            scale=scale,
            skip=readback.largest([reading.skip for reading in readings if reading.skip is not None]),
            forward=forward.joined(forwards),
            scalars=scalars.collect(values),
            reads_rss=self._reads_rss,
        )

    def _look_for_gradients(self, readings: Sequence[StepReading]) -> None:
        read = [reading for reading in readings if reading.partials is not None]
        # A rank of FSDP1 may hold no part of any parameter.
        if any(reading.num_gradients or reading.has_plain_shards for reading in read):
            self._num_empty = 0
        elif read:
            self._num_empty += 1
            if self._num_empty == EMPTY_STEPS:
                self._unavailable("grad/norm", _why_empty(read))

    def _observed(self, step: int, observers: Sequence[StepObserver]) -> StepScalars:
        found: list[tuple[wire.Column, float | torch.Tensor]] = []
        for observer in observers:
            found += self._guard.call(observer.part, observer.end_step, step) or ()
        return found

    def _own(self) -> StepScalars:
        if not self._is_clock:
            return ()
        scale = [] if self._scale is None else [(wire.Column("scaler/scale"), self._scale)]
        return [*scale, *self._clip_norm.scalars(), *self._times.end_step(self.at_s)]


def _why_empty(readings: Sequence[StepReading]) -> str:
    for reading in readings:
        if reading.partials is not None and not reading.partials.layout.layers:
            return "; ".join(reading.partials.layout.notes) or NO_GRADIENTS
    return NO_GRADIENTS
