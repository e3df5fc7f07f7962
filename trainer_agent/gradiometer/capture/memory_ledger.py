"""The memory ledger: what parameters, gradients and optimizer state occupy, and what is left for activations.

Measured when a step ends, after the update and before the usual `zero_grad`; gradients when they are read, because of
several optimizers each may clear its own. The exact parts are counted tensor by tensor, and anew only when something may
have changed: walking thousands of tensors in every step would cost more than all the rest of the agent. Peaks are the
user's: none is ever reset, and that somebody else does so is told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

import torch

from gradiometer import wire
from gradiometer.capture import memory
from gradiometer.capture.checks.sentinel import optimizers_in, parameters_of
from gradiometer.capture.memory import StorageBytes
from gradiometer.capture.observer import StepScalars, Watched

KINDS: Final = ("parameters", "buffers", "gradients", "optimizer_state")
ACTIVATIONS: Final = "memory/activations_bytes"
DEVICE_TOTAL: Final = "memory/device_total_bytes"
PEAK_RESETS: Final = "memory/peak_resets"
COUNT_EVERY: Final = 128
"""Steps after which everything is counted again though nothing showed a change: tensors were moved or cast."""
_AT_LEAST: Final = 16
"""Steps between two counts when something does change all the time, such as which experts get a gradient."""
_STORAGES_PER_STEP: Final = 10
"""Of very many tensors on average no more than this are looked at in a step (and ten times as many in the case above)."""
_SHARE_SHOWN: Final = 0.01
"""A type that holds less of its kind is not shown apart: AdamW's step counters."""
_MAX_OPTIMIZERS: Final = 64
_open: Final[list[MemoryLedger]] = []


class MemoryLedger:
    """Of one watch; the one that is the clock also reports the device.

    Attributes:
        on_device: bytes of all kinds on the model's device, as last counted.
    """

    part = "memory ledger"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._suffix = f"/{watched.name}" if watched.name else ""
        self._num_steps = self._next_count = self._counted_at = self._num_storages = 0
        self._key: tuple[int, ...] = (-1,)
        self._gradients, self._gradients_due = StorageBytes(set()), False
        self._counted: list[tuple[wire.Column, float]] = []
        self.on_device = 0
        self._device = DeviceLedger(watched) if watched.is_clock else None
        _open.append(self)

    # Hot path: training thread, once per step, like `end_step`.
    def before_read(self) -> None:
        """See `StepObserver`."""
        if self._gradients_due or self._num_steps + 1 >= self._next_count:
            self._gradients = StorageBytes(set())
            if not self._is_counted_elsewhere():
                gradients = (one.grad for one in self._parameters())
                self._gradients.add(gradient for gradient in gradients if gradient is not None)

    # Hot path: training thread, once per step. Must not walk the parameters when nothing changed.
    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        self._num_steps += 1
        key = self._key_now()
        if self._is_due(key):
            # Gradients came or went: those that there are now are gone when the next step is read.
            self._gradients_due = key[-1] != self._key[-1]
            self._key, self._counted_at = key, self._num_steps
            self._count()
            # At steps 1, 2, 4, ..., because optimizers make their state late and LBFGS little by little.
            every = max(COUNT_EVERY, self._num_storages // _STORAGES_PER_STEP)
            self._next_count = self._num_steps + min(self._num_steps, every)
        return self._counted if self._device is None else [*self._counted, *self._device.end_step()]

    def close(self) -> None:
        """See `StepObserver`."""
        if self in _open:
            _open.remove(self)

    def _key_now(self) -> tuple[int, ...]:
        """What changes when tensors come or go."""
        optimizers = optimizers_in(self._watched.optimizer)
        if len(optimizers) > _MAX_OPTIMIZERS:
            return (len(optimizers), self._watched.num_gradients())
        num_states = sum(len(state) for optimizer in optimizers for state in memory.states_of(optimizer))
        num_parameters = sum(
            len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups
        )
        return (num_parameters, num_states, self._watched.num_gradients())

    def _is_due(self, key: tuple[int, ...]) -> bool:
        if self._num_steps >= self._next_count:
            return True
        least = max(_AT_LEAST, self._num_storages // (10 * _STORAGES_PER_STEP))
        is_early = self._num_steps <= _AT_LEAST
        return key != self._key and (is_early or self._num_steps - self._counted_at >= least)

    def _count(self) -> None:
        counts = self._counts()
        self.on_device = sum(count.on(self._watched.device) for count in counts.values())
        self._counted = []
        for kind, count in counts.items():
            if kind != "buffers" or count.total:
                self._counted += self._shown(f"memory/{kind}_bytes{self._suffix}", count)
        num_unknown = sum(count.num_unknown for count in counts.values())
        if num_unknown:
            reason = (
                f"{num_unknown} tensors have a layout whose memory torch does not tell; they are not counted"
            )
            self._watched.unavailable(f"memory/parameters_bytes{self._suffix}", reason)

    def _counts(self) -> dict[str, StorageBytes]:
        # In the order of the kinds: what an optimizer's state shares with the parameters belongs to the parameters.
        seen: set[int] = set()
        counts = {kind: StorageBytes(seen) for kind in KINDS}
        if not self._is_counted_elsewhere():
            counts["parameters"].add(self._parameters())
            counts["buffers"].add(self._watched.model.buffers())
        counts["gradients"] = self._gradients
        for one in optimizers_in(self._watched.optimizer):
            for state in memory.states_of(one):
                counts["optimizer_state"].add(memory.tensors_in(list(state.values()), memory.MAX_DEPTH + 1))
        self._num_storages = len(seen)
        return counts

    def _parameters(self) -> Iterable[torch.Tensor]:
        """Those of the model, also the frozen ones, and those that only the optimizer has, as with FSDP."""
        both = itertools.chain(parameters_of(self._watched.optimizer), self._watched.model.parameters())
        return {id(one): one for one in both}.values()

    def _is_counted_elsewhere(self) -> bool:
        """Whether this is another watch of the same model, with an optimizer of its own."""
        before = _open[: _open.index(self)]
        return any(other._watched.model is self._watched.model for other in before)

    def _shown(self, name: str, count: StorageBytes) -> list[tuple[wire.Column, float]]:
        found = [(name, count.total)]
        least = _SHARE_SHOWN * count.total
        shown = {dtype: size for dtype, size in count.by_dtype.items() if size >= least > 0}
        if len(shown) > 1:
            found += [(f"{name}/{dtype}", size) for dtype, size in sorted(shown.items())]
        return [(wire.Column(metric, "max"), float(size)) for metric, size in found]


class DeviceLedger:
    """What torch's allocator holds on the model's device, and an estimate of the activations' share of the peak."""

    def __init__(self, watched: Watched) -> None:
        self._device = watched.device
        self._total_bytes: float | None = None
        self._peak_bytes, self._num_resets = 0.0, 0
        if self._device.type != "cuda":
            reason = f"the model is on {self._device.type}: torch counts memory on CUDA only"
            for metric in (*memory.DEVICE_METRICS, ACTIVATIONS, DEVICE_TOTAL):
                watched.unavailable(metric, reason)

    def end_step(self) -> StepScalars:
        """The numbers of the step that ends."""
        if self._device.type != "cuda":
            return ()
        if self._total_bytes is None:
            self._total_bytes = float(torch.cuda.get_device_properties(self._device).total_memory)
        numbers = memory.device_numbers(self._device)
        known_bytes = sum(ledger.on_device for ledger in _open if ledger._watched.device == self._device)
        numbers[DEVICE_TOTAL] = self._total_bytes
        numbers |= self.of_peak(numbers["memory/peak_allocated_bytes"], known_bytes)
        return [(wire.Column(name, "max"), value) for name, value in numbers.items()]

    def of_peak(self, peak_bytes: float, known_bytes: float) -> dict[str, float]:
        """What follows from a peak: how often somebody set it back so far, and what was not counted of it."""
        self._num_resets += peak_bytes < self._peak_bytes
        self._peak_bytes = peak_bytes
        # Not below 0: the peak may be from before the optimizer made its state.
        return {ACTIVATIONS: max(0.0, peak_bytes - known_bytes), PEAK_RESETS: float(self._num_resets)}
