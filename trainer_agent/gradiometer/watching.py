"""The watches of one run: which optimizers are followed, and whose steps are the clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from gradiometer import values
from gradiometer.guard import Guard
from gradiometer.reports import Report

if TYPE_CHECKING:
    from gradiometer.watch import StepClock, Watch

_log: Final = logging.getLogger(__name__)


class Watches:
    """Follows any number of optimizers; the first is the clock. Imports torch with the first of them, not before.

    Args:
        start_step: optimizer steps completed before this process.
        emit: takes a report; must not wait.
        unavailable: told a metric and why it cannot be collected; may be told again.
        mistaken: the same, where the user can do something about it.
    """

    def __init__(
        self,
        *,
        start_step: int,
        emit: Callable[[Report], None],
        unavailable: Callable[[str, str], None],
        mistaken: Callable[[str, str], None],
        guard: Guard,
    ) -> None:
        self._start_step = start_step
        self._emit, self._unavailable, self._mistaken, self._guard = emit, unavailable, mistaken, guard
        self._clock: StepClock | None = None
        self._watches: list[Watch] = []

    def add(
        self,
        model: Any,
        optimizer: Any,
        scaler: Any,
        name: str | None,
        forward: bool | None,
        sharded: Mapping[str, Any] | None,
    ) -> None:
        """See `Run.watch`; raises whatever torch raises."""
        import torch

        from gradiometer.capture import groups, scaling
        from gradiometer.watch import StepClock, Watch, unwrap_optimizer

        inner = unwrap_optimizer(optimizer)
        if not isinstance(model, torch.nn.Module) or not isinstance(inner, torch.optim.Optimizer):
            kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
            self._mistaken("grad/norm", f"watch() needs a torch module and a torch optimizer, got {kinds}")
            return
        if any(watch.is_for(inner) for watch in self._watches):
            _log.warning("gradiometer: watch() was called twice for one optimizer; the second is ignored.")
            return
        if not scaling.is_scaler(scaler):
            self._mistaken("scaler/scale", f"watch() needs torch's GradScaler, got {type(scaler).__name__}")
            scaler = None
        is_clock, clock = not self._watches, self._clock or StepClock(self._start_step)
        watch = Watch(
            model,
            inner,
            scaler,
            clock=clock,
            is_clock=is_clock,
            name=values.encodable(str(name or "")) or ("" if is_clock else f"model{len(self._watches) + 1}"),
            forward_probe=forward,
            emit=self._emit,
            unavailable=self._unavailable,
            guard=self._guard,
            sharded=groups.places(sharded or {}, lambda reason: self._mistaken("grad/layers", reason)),
        )
        self._watches.append(watch)
        self._clock = clock

    @property
    def step(self) -> int | None:
        """The last completed step; None before the first `add`."""
        return self._clock.step if self._clock is not None else None

    # Hot path: training thread.
    def step_of_log(self) -> int | None:
        """The step that a value logged now belongs to; None if nothing is watched."""
        return self._watches[0].step_of_log() if self._watches else None

    def close(self) -> None:
        """Leave models, optimizers, scalers and torch as they were before."""
        for watch in self._watches:
            self._guard.tolerate("finish", watch.close)

    def abandon(self) -> None:
        """In a forked child: see nothing more."""
        for watch in self._watches:
            watch.abandon()
        self._watches = []
