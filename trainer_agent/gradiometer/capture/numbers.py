"""The numbers of a step's end that the watch itself knows: learning rates and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from gradiometer import wire
from gradiometer.capture import entry_cost
from gradiometer.capture.observer import StepScalars
from gradiometer.capture.reading import StepReading
from gradiometer.guard import Guard

MAX_RATES: Final = 16
"""Learning rates recorded for one watch without asking whether they differ: with an optimizer for each parameter there
may be thousands of equal ones."""

_MAX_NAME_CHARS: Final = 100
"""Longest name of an optimizer within a metric's name."""


class Rates:
    """Names the learning rates of a watch's parameter groups.

    The first is `train/lr`; further groups get `/group1`, ... counted over all optimizers without a name, and within
    those that have one.

    Args:
        name: the watch's; empty for the first.
        names: of the optimizers.
        unavailable: told if not all are recorded.
    """

    def __init__(self, name: str, names: Sequence[str], unavailable: Callable[[str, str], None]) -> None:
        self._base = f"train/lr/{name}" if name else "train/lr"
        self._names = [wire.fitting_name(one, _MAX_NAME_CHARS) if one else "" for one in names]
        self._unavailable = unavailable
        for one, fitting in zip(names, self._names, strict=True):
            if one != fitting:
                reason = "the name of its optimizer cannot be in a metric's name and was changed to this"
                unavailable(f"{self._base}/{fitting}", reason)
        self._shown: set[str] | None = None

    def of(self, readings: Sequence[StepReading]) -> StepScalars:
        """The rates that were used in a step."""
        found: list[tuple[wire.Column, float | torch.Tensor]] = []
        counts: dict[str, int] = {}
        for name, reading in zip(self._names, readings, strict=True):
            base = f"{self._base}/{name}" if name else self._base
            # An optimizer that left the step out has no rates in it, but keeps its groups' numbers.
            rates = reading.rates or [None] * len(reading.optimizer.param_groups)
            for rate in rates:
                index = counts[base] = counts.get(base, -1) + 1
                if rate is not None:
                    found.append((wire.Column(base if index == 0 else f"{base}/group{index}"), rate))
        return found if sum(counts.values()) + len(counts) <= MAX_RATES else self._some(found)

    def _some(self, found: StepScalars) -> StepScalars:
        """Of very many rates those that differed from each other in the first step that had so many."""
        if self._shown is None:
            distinct: dict[float, str] = {}
            for column, rate in found:
                # A tensor is not asked for its value.
                distinct.setdefault(float(id(rate)) if isinstance(rate, torch.Tensor) else rate, column.name)
            self._shown = set(list(distinct.values())[:MAX_RATES])
            reason = f"{len(found)} learning rates: recorded are {len(self._shown)} that differed in the first step"
            self._unavailable(f"{self._base}/group*", reason)
        return [(column, rate) for column, rate in found if column.name in self._shown]


class Times:
    """How long steps take, and the agent in them: all that was booked on the guard since the last step's end."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        guard.entry_s = entry_cost.seconds()
        self._ended_s: float | None = None
        self._before_s = 0.0

    def end_step(self, now_s: float) -> StepScalars:
        """A step ends at `now_s` of `time.perf_counter`. What the end of a step costs is booked on the next one."""
        spent_s, self._before_s = self._guard.spent_s - self._before_s, self._guard.spent_s
        before_s, self._ended_s = self._ended_s, now_s
        agent = (wire.Column("agent/step_s", "max"), spent_s)
        if before_s is None or now_s <= before_s:
            return [agent]
        step_s = now_s - before_s
        overhead = (wire.Column("agent/overhead_fraction", "max"), spent_s / step_s)
        return [(wire.Column("time/step_s", "max"), step_s), agent, overhead]
