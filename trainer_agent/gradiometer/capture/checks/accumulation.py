"""Checks `accumulation_not_divided` and `partial_accumulation`: what the losses of one step were multiplied by.

A hook on a logged loss gets d(final)/d(loss) when its backward pass starts: the factor between what was logged and
what was differentiated, times the loss scale. A step over k micro-batches of mean losses should add up to 1.
"""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import dataclass
from typing import Final

import torch

from gradiometer import values, wire
from gradiometer.capture import backward, scalars, scaling
from gradiometer.capture.checks import losses
from gradiometer.capture.checks.finding import CheckReport, Finding, Tally
from gradiometer.capture.checks.sentinel import Before, Sentinel
from gradiometer.capture.observer import StepScalars, Watched

NOT_DIVIDED: Final = "accumulation_not_divided"
PARTIAL: Final = "partial_accumulation"
_MAX_PASSES: Final = 4096
"""Backward passes followed per step; a step with more is not judged."""
_TELL_AFTER: Final = 50


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One backward pass from one logged loss.

    Attributes:
        task: torch's number of the backward pass.
        factor, scale: what the loss was multiplied by, and the loss scale in it.
        before: largest old gradient when it reached the sentinel; 0: none, so that a new sum began.
        reached: whether it added to the sentinel's gradient at all, in the end.
    """

    name: str
    kind: losses.Kind
    task: int
    factor: torch.Tensor
    scale: torch.Tensor | float
    before: torch.Tensor | float = 0.0
    reached: bool = False


class Accumulation:
    """Collects the factors of one step, on the device, and has them judged when it ends."""

    part = "check accumulation"

    def __init__(self, watched: Watched, sentinel: Sentinel) -> None:
        self._watched, self._sentinel = watched, sentinel
        self._judge = Judge()
        self._tallies = {NOT_DIVIDED: Tally(), PARTIAL: Tally()}
        self._passes: list[_Pass] = []
        self._hooked: dict[tuple[str, int], weakref.ref[torch.Tensor]] = {}
        self._num_steps = self._num_judged = 0
        self._accumulates = False
        # The sentinel's gradient after the last pass, and as it is read: a loop may divide the sum itself.
        self._after: Before = None
        self._read: Before = None
        sentinel.subscribe(self._accumulated)

    def loss_logged(self, name: str, loss: torch.Tensor) -> None:
        """See `LossObserver`."""
        if not values.is_train_loss(name):
            return
        place = (name, id(loss))
        known = self._hooked.get(place)
        if known is not None and known() is loss:
            return
        self._hooked[place] = weakref.ref(loss)
        kind = losses.kind_of(loss)
        guard, part, start = self._watched.guard, self.part, self._started

        def started(gradient: torch.Tensor) -> None:
            guard.entered(part, start, name, kind, gradient)

        loss.register_hook(started)  # type: ignore[no-untyped-call]

    # Hot path: training thread, once per backward pass of a logged loss. Must read no value.
    def _started(self, name: str, kind: losses.Kind, gradient: torch.Tensor) -> None:
        factor = scalars.local_scalar(gradient)
        if factor is None or len(self._passes) > _MAX_PASSES or torch.compiler.is_compiling():
            return
        if factor.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        scaler = self._watched.scaler
        scale = scaling.scale_of(scaler) if scaler is not None else None
        self._passes.append(
            _Pass(
                name=name,
                kind=kind,
                task=_task(),
                factor=factor.detach().clone(),
                scale=1.0 if scale is None else scale,
            )
        )

    def _accumulated(self, before: Before) -> None:
        task = _task()
        for one in reversed(self._passes):
            if one.task != task:
                break
            one.reached, one.before = True, 0.0 if before is None else before
        self._after = self._sentinel.observe() if len(self._passes) > 1 else None

    def before_read(self) -> None:
        """See `StepObserver`."""
        self._read = None if self._after is None else self._sentinel.observe()

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        passes = [one for one in self._passes if one.reached]
        is_whole = len(self._passes) <= _MAX_PASSES
        ends = tuple(0.0 if one is None else one for one in (self._after, self._read))
        self._passes, self._hooked, self._after, self._read = [], {}, None, None
        self._num_steps += 1
        if passes and is_whole:
            self._num_judged += 1
            self._accumulates = self._accumulates or len({one.name for one in passes}) < len(passes)
            # A loop that has never accumulated has nothing to be judged by.
            if self._accumulates:
                self._report(step, passes, ends)
        elif self._num_steps == _TELL_AFTER and self._num_judged == 0:
            self._tell_why_not()
        return ()

    def _report(self, step: int, passes: list[_Pass], ends: tuple[float | torch.Tensor, ...]) -> None:
        numbers = [*ends]
        for one in passes:
            numbers += [one.factor, one.scale, one.before]
        pending = scalars.collect([(wire.Column("value"), number) for number in numbers])
        names = [(one.name, one.kind, one.task) for one in passes]
        # One reading serves both checks, in this order, on the agent's thread.
        found: list[Finding | None] = []

        def first() -> Finding | None:
            found.append(self._judge.judge(names, pending.row()))
            return found[0] if found[0] is not None and found[0].check == NOT_DIVIDED else None

        def second() -> Finding | None:
            return found[0] if found and found[0] is not None and found[0].check == PARTIAL else None

        for check, judge in ((NOT_DIVIDED, first), (PARTIAL, second)):
            self._watched.emit(
                CheckReport(
                    step=step,
                    time=time.time(),
                    watch=self._watched.name,
                    tally=self._tallies[check],
                    judge=judge,
                )
            )

    def _tell_why_not(self) -> None:
        why = self._sentinel.problem or (
            "no training loss was logged as a tensor before backward()"
            if self._sentinel.is_hooked
            else "hooks on sharded parameters are not called"
        )
        self._watched.unavailable("check/accumulation", f"not checked: {why}")

    def close(self) -> None:
        """See `StepObserver`."""
        self._passes, self._hooked = [], {}


def _task() -> int:
    task = backward.task()
    return -1 if task is None else task


class Judge:
    """Judges the factors of one step after another. Agent thread only."""

    _TOLERANCE: Final = 0.01
    """Of a factor, relative: a bfloat16 loss carries its gradient to 8 bits."""

    def __init__(self) -> None:
        self._num_undivided: dict[str, int] = {}
        self._usual: dict[str, tuple[int, int]] = {}

    def judge(self, names: list[tuple[str, losses.Kind, int]], values: list[float]) -> Finding | None:
        """The first finding of a step.

        Args:
            names: of the losses, how each was reduced, and the number of the backward pass.
            values: the sentinel's gradient after the last pass, and as it was read (0: not known); then factor, scale
                and old gradient of each pass in turn.
        """
        after, read, *of_passes = values
        sums: dict[str, list[tuple[losses.Kind, float]]] = {}
        last_task: int | None = None
        for index, (name, kind, task) in enumerate(names):
            factor, scale, before = of_passes[3 * index : 3 * index + 3]
            if before == 0.0 and task != last_task:
                # The gradients were cleared: what came before is not in this step's gradient.
                sums.clear()
            last_task = task
            sums.setdefault(name, []).append((kind, factor / scale if scale else float("nan")))
        later = [1.0] if after == 0.0 or read == 0.0 else [read / after, read * of_passes[1] / after]
        found = [self._of_loss(name, passes, later) for name, passes in sums.items()]
        return next((one for one in found if one is not None), None)

    def _of_loss(
        self, name: str, passes: list[tuple[losses.Kind, float]], later: list[float]
    ) -> Finding | None:
        """`later`: what the sum may have been multiplied by after the last pass, with the loss scale and without."""
        factors = [factor for _, factor in passes]
        count = len(factors)
        if count >= 2 and any(not math.isfinite(one) or self._all_are([one], 1.0 / count) for one in later):
            # Divided after the sum was made, or that cannot be told.
            self._num_undivided[name] = 0
            return None
        if count >= 2 and self._all_are(factors, 1.0) and all(kind == "mean" for kind, _ in passes):
            self._num_undivided[name] = self._num_undivided.get(name, 0) + 1
            # Twice, because the first step of a loop may be a special one.
            return _not_divided(name, count) if self._num_undivided[name] >= 2 else None
        self._num_undivided[name] = 0
        usual, times = self._usual.get(name, (0, 0))
        if usual >= 2 and times >= 2 and count < usual and self._all_are(factors, 1.0 / usual):
            return _partial(name, count, usual)
        if count >= 2 and self._all_are(factors, 1.0 / count):
            self._usual[name] = (count, times + 1 if usual == count else 1)
        return None

    def _all_are(self, factors: list[float], expected: float) -> bool:
        return all(abs(factor / expected - 1.0) < self._TOLERANCE for factor in factors)


def _not_divided(name: str, count: int) -> Finding:
    return Finding(
        check=NOT_DIVIDED,
        title=f"Accumulated gradients are the sum of {count} micro-batches, not their mean",
        text=f"Each of the {count} micro-batches of a step adds the full gradient of its own mean loss ({name}), so the "
        f"gradient is {count} times as large as that of one batch of the same total size. Clipping then cuts {count} "
        "times harder, and with SGD the learning rate is in effect that many times higher.",
        advice=f"Divide each micro-batch's loss by {count} before backward(). If the sum is meant, switch the checks "
        "off with watch(checks=False).",
        facts={"micro_batches": count, "sum_of_multipliers": float(count), "loss": name},
    )


def _partial(name: str, count: int, usual: int) -> Finding:
    return Finding(
        check=PARTIAL,
        severity="info",
        title=f"A step over {count} of {usual} micro-batches was still divided by {usual}",
        text=f"Each loss ({name}) was divided by {usual}, but this step had {count} micro-batch{'es' if count > 1 else ''}, "
        f"as happens at the end of an epoch. Its gradient is {count / usual:.3g} times what it should be.",
        advice="Divide by the number of micro-batches that the step really has, or leave the incomplete ones out "
        "(DataLoader(drop_last=True)).",
        facts={
            "micro_batches": count,
            "divided_by": usual,
            "sum_of_multipliers": count / usual,
            "loss": name,
        },
    )
