"""Values logged once per micro-batch become values of the optimizer step: mean, mean of the finite ones, and their count.

One bad micro-batch makes the mean NaN, as it makes the gradient NaN, and must be seen. The other two say that the
seven beside it were well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from gradiometer import wire
from gradiometer.capture import scalars
from gradiometer.capture.observer import StepScalars, Watched
from gradiometer.records import Records
from gradiometer.reports import Scalars

FINITE_MEAN: Final = "_finite_mean"
NUM_NONFINITE: Final = "_num_nonfinite"
_MAX_VALUES: Final = 65_536
"""Kept per step: bounds memory in a loop that never steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchReport:
    """All values of one step, in the order in which they were logged."""

    step: int
    time: float
    scalars: Scalars

    def write(self, records: Records) -> None:
        """See `Report`."""
        by_column: dict[wire.Column, list[float]] = {}
        for column, value in zip(self.scalars.columns, self.scalars.row(), strict=True):
            by_column.setdefault(column, []).append(value)
        columns: list[wire.Column] = []
        row: list[float] = []
        for column, values in by_column.items():
            for one, value in summary(column, values):
                columns.append(one)
                row.append(value)
        records.add_scalars(self.step, self.time, tuple(columns), row)


def summary(column: wire.Column, values: list[float]) -> list[tuple[wire.Column, float]]:
    """What is stored of the micro-batches' values; the mean of the finite ones is left out where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    # math.fsum raises on infinities of both signs; the plain sum is NaN then, as it should be.
    found = [(column, sum(values) / len(values))]
    if len(column.name) + len(NUM_NONFINITE) > wire.MAX_NAME_CHARS:
        return found
    if finite:
        found.append((wire.Column(column.name + FINITE_MEAN), math.fsum(finite) / len(finite)))
    found.append((wire.Column(column.name + NUM_NONFINITE, "sum"), float(len(values) - len(finite))))
    return found


class MicroBatches:
    """Keeps the values of `Run.log_microbatch` until the step ends."""

    part = "micro-batches"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._values: list[tuple[wire.Column, Any]] = []

    # Hot path: training thread, once per micro-batch. Copies one-element tensors on their device; reads no value.
    def add(self, found: Sequence[tuple[wire.Column, float | torch.Tensor]]) -> None:
        """Values of one micro-batch."""
        if len(self._values) + len(found) > _MAX_VALUES:
            self._watched.unavailable(
                "micro-batches",
                f"one step has more than {_MAX_VALUES} values; its means are of the first ones",
            )
            return
        self._values += [
            (column, value.detach().clone() if isinstance(value, torch.Tensor) else value)
            for column, value in found
        ]

    def before_read(self) -> None:
        """See `StepObserver`."""

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        values, self._values = self._values, []
        if values:
            self._watched.emit(MicroBatchReport(step=step, time=time.time(), scalars=scalars.collect(values)))
        return ()

    def close(self) -> None:
        """See `StepObserver`."""
        self._values = []
