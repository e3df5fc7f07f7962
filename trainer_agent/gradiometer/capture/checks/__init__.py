"""Exact checks of the training loop: mistakes that can be proved from what the hooks see, not guessed from curves.

One check, one module. Each is a step observer; all share one sentinel, a small parameter whose gradient tells what
happened to the gradients of its watch. A check that cannot be made says so; a right loop hears nothing.
"""

from __future__ import annotations

from gradiometer.capture.checks.accumulation import Accumulation
from gradiometer.capture.checks.clipping import ClipBeforeUnscale
from gradiometer.capture.checks.coverage import Coverage
from gradiometer.capture.checks.learning_rate import ZeroLearningRate
from gradiometer.capture.checks.resume import OptimizerReset
from gradiometer.capture.checks.scaler_given import ScalerNotGiven
from gradiometer.capture.checks.sentinel import Sentinel
from gradiometer.capture.checks.zero_grad import MissingZeroGrad
from gradiometer.capture.observer import StepObserver, Watched


def all_of(watched: Watched) -> list[StepObserver]:
    """All checks of one watch."""
    sentinel = Sentinel(watched)
    found: list[StepObserver] = [
        # First: it chooses its parameter before the others look at it.
        sentinel,
        MissingZeroGrad(watched, sentinel),
        Accumulation(watched, sentinel),
        ClipBeforeUnscale(watched),
        OptimizerReset(watched),
        ScalerNotGiven(watched),
    ]
    if watched.is_clock:
        found += [Coverage(watched), ZeroLearningRate(watched)]
    return found
