"""The watches of one run: which optimizers are followed, and whose steps are the clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from gradiometer import values, wire
from gradiometer.drops import Drops
from gradiometer.flight import FlightDesk
from gradiometer.guard import Guard
from gradiometer.histograms import HistogramDesk
from gradiometer.plain import text_of
from gradiometer.reports import Report

if TYPE_CHECKING:
    from gradiometer.capture.checks.no_step import NoStep
    from gradiometer.capture.clock import StepClock
    from gradiometer.capture.layout import Layout
    from gradiometer.capture.microbatches import MicroBatches
    from gradiometer.capture.observer import LossObserver
    from gradiometer.capture.optimizers import Optimizers
    from gradiometer.watch import Watch

_log: Final = logging.getLogger(__name__)
_MAX_NAME_CHARS: Final = 100
"""Longest name of a watch: it is put before the names of layers and after those of metrics."""


class Watches:
    """Follows any number of optimizers; the first is the clock. Imports torch with the first of them, not before.

    Args:
        start_step: optimizer steps completed before this process.
        emit: takes a report; must not wait.
        unavailable: told a metric and why it cannot be collected; may be told again.
        mistaken: the same, where the user can do something about it.
        drops: told of histograms that are not taken.

    Attributes:
        flight: where the flight recorder works; None: it is off.
        histograms: where histograms are asked for.
    """

    def __init__(
        self,
        *,
        start_step: int,
        emit: Callable[[Report], None],
        unavailable: Callable[[str, str], None],
        mistaken: Callable[[str, str], None],
        guard: Guard,
        drops: Drops,
    ) -> None:
        self.histograms = HistogramDesk(drops, unavailable)
        self._start_step = start_step
        self._emit, self._unavailable, self._mistaken, self._guard = emit, unavailable, mistaken, guard
        self._clock: StepClock | None = None
        self._watches: list[Watch] = []
        self._num_added = 0
        # The watch whose steps are the run's.
        self._leader: Watch | None = None
        self._loss_observers: list[LossObserver] = []
        self._micro_batches: MicroBatches | None = None
        self._no_step: NoStep | None = None
        self.flight: FlightDesk | None = None

    def add(
        self,
        model: Any,
        optimizer: Any,
        scaler: Any,
        name: str | None,
        forward: bool | None,
        sharded: Mapping[str, Any] | None,
        checks: bool = True,
        statistics: str = "auto",
        every: int | None = None,
        histogram_every: int | None = None,
    ) -> None:
        """See `Run.watch`; raises whatever torch raises."""
        import torch

        from gradiometer.capture import groups, optimizers, scaling, tiers
        from gradiometer.capture.checks.no_step import NoStep
        from gradiometer.capture.clock import StepClock
        from gradiometer.capture.microbatches import MicroBatches
        from gradiometer.capture.observer import LossObserver
        from gradiometer.watch import Watch

        found = optimizers.find(optimizer, model) if isinstance(model, torch.nn.Module) else None
        if found is None:
            self._mistaken("grad/norm", _what_was_given(model, optimizer))
            return
        if any(watch.is_for(one) for watch in self._watches for one in found.all):
            _log.warning("gradiometer: watch() was called twice for one optimizer; the second is ignored.")
            return
        if not scaling.is_scaler(scaler):
            self._mistaken("scaler/scale", f"watch() needs torch's GradScaler, got {type(scaler).__name__}")
            scaler = None
        tier = tiers.of_watch(model, statistics, every, self._mistaken)
        is_clock, clock = self._leader is None, self._clock or StepClock(self._start_step)
        shown_as = self._name_of(name, is_clock=is_clock)
        watch = Watch(
            model,
            found,
            scaler,
            clock=clock,
            is_clock=is_clock,
            name=shown_as,
            forward_probe=forward,
            emit=self._emit,
            unavailable=self._unavailable,
            guard=self._guard,
            sharded=groups.places(sharded or {}, lambda reason: self._mistaken("grad/layers", reason)),
            checks=checks,
            tier=tier,
            histograms=self.histograms,
            histogram_every=tiers.every_of("histogram_every", histogram_every, self._mistaken),
            layouts=self._layouts,
        )
        self._emit(tiers.report_of(tier, shown_as))
        if tier.lack is not None:
            self._unavailable("grad/zero_fraction", tier.lack)
        if is_clock and self.flight is not None:
            self._record_flight(watch, model, found, scaler, clock.step)
        self._loss_observers += [one for one in watch.observers if isinstance(one, LossObserver)]
        if is_clock:
            self._leader = watch
            self._micro_batches = next((o for o in watch.observers if isinstance(o, MicroBatches)), None)
            self._no_step = NoStep(self._emit) if checks else None
        self._watches.append(watch)
        self._num_added += 1
        self._clock = clock

    def _name_of(self, given: str | None, *, is_clock: bool) -> str:
        """What a new watch is called: as the user says, if that can be in the names of metrics and is not in use."""
        default = "" if is_clock else f"model{self._num_added + 1}"
        wanted = (given if isinstance(given, str) else text_of(given)) if given else default
        if not wanted:
            return wanted
        fitting = name = wire.fitting_name(wanted, _MAX_NAME_CHARS)
        in_use, number = {watch.name for watch in self._watches}, 1
        while name in in_use:
            number += 1
            name = f"{fitting}#{number}"
        if name != wanted:
            reason = "another watch has this name" if name != fitting else "this cannot be in a metric's name"
            self._mistaken("grad/layers", f"watch {wanted[:80]!a} is called {name!r} instead: {reason}")
        return name

    def _layouts(self) -> Iterable[Layout]:
        return (watch.layout for watch in self._watches if watch.layout is not None)

    def _record_flight(
        self, watch: Watch, model: Any, found: Optimizers, scaler: Any, start_step: int
    ) -> None:
        from gradiometer.capture.flight_recorder import FlightRecorder

        assert self.flight is not None
        recorder = FlightRecorder(
            model,
            found.all,
            scaler,
            self.flight,
            start_step=start_step,
            unavailable=self._unavailable,
            guard=self._guard,
        )
        watch.observers.append(recorder)

    def remove(self, optimizer: Any) -> None:
        """See `Run.unwatch`."""
        from gradiometer.capture import optimizers

        given = list(optimizers.each(optimizer))
        for watch in [watch for watch in self._watches if any(map(watch.is_for, given))]:
            self._watches.remove(watch)
            gone = set(map(id, watch.observers))
            self._loss_observers = [one for one in self._loss_observers if id(one) not in gone]
            if watch is self._leader:
                self._leader = self._micro_batches = self._no_step = None
            watch.close()
        if given and self._leader is None and self._watches:
            self._mistaken("grad/norm", _NO_CLOCK)

    @property
    def step(self) -> int | None:
        """The last completed step; None before the first `add`."""
        return self._clock.step if self._clock is not None else None

    # Hot path: training thread.
    def step_of_log(self) -> int | None:
        """The step that a value logged now belongs to; None if nothing is watched."""
        return self.step if self._leader is None else self._leader.step_of_log()

    @property
    def is_watching(self) -> bool:
        """Whether anything here wants to know what is logged."""
        return self._clock is not None

    # Hot path: training thread, once per `log`. Must not walk the found values of a run that watches nothing.
    def logged(self, found: Sequence[tuple[wire.Column, Any]]) -> None:
        """Values are being logged: tells the checks about the losses among them."""
        clock = self._clock
        if clock is None:
            return
        if self._no_step is not None and any(values.is_train_loss(column.name) for column, _ in found):
            if clock.step == clock.start_step:
                self._no_step.logged(clock.step)
            else:
                self._no_step = None
        for column, value in found:
            if type(value) is not float and value.requires_grad and value.grad_fn is not None:
                for observer in self._loss_observers:
                    self._guard.call(observer.part, observer.loss_logged, column.name, value)

    def keep_for_step(self, found: Sequence[tuple[wire.Column, Any]]) -> bool:
        """Keep values of a micro-batch until its optimizer step ends; False if nothing is watched."""
        micro_batches = self._micro_batches
        if micro_batches is None:
            return False
        self._guard.call(micro_batches.part, micro_batches.add, found)
        return True

    def close(self, *, ended_well: bool = False) -> None:
        """Leave models, optimizers, scalers and torch as they were before."""
        if ended_well and self._no_step is not None and self.step == self._start_step:
            self._no_step.end(self._start_step)
        self._forget_observers()
        for watch in self._watches:
            self._guard.tolerate("finish", watch.close)

    def abandon(self) -> None:
        """In a forked child: see nothing more."""
        self._forget_observers()
        for watch in self._watches:
            watch.abandon()
        self._watches, self._leader = [], None

    def _forget_observers(self) -> None:
        self._loss_observers, self._micro_batches, self._no_step = [], None, None


_NO_CLOCK: Final = (
    "unwatch() ended the watch whose steps were those of the run: until the next watch() the step stands still, and the "
    "other watches report nothing"
)


def _what_was_given(model: Any, optimizer: Any) -> str:
    kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
    return (
        f"watch() needs a torch module and a torch optimizer, or a list or dict of optimizers, got {kinds}; without an "
        "optimizer it takes those that _apply_optimizer_in_backward made, and the model has none"
    )
