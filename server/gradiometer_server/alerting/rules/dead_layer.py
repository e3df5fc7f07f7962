"""Rule `dead_layer`: trainable layers whose gradient is exactly zero, or never there, step after step."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradiometer_server.alerting.history import LayerHistory
from gradiometer_server.alerting.rules.base import MAX_NAMED_LAYERS
from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.alerts import Breach, Severity
from gradiometer_server.domain.folded import FoldedBlock, FoldedLayers, FoldedStep

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLayerDefaults:
    """Defaults of the rule.

    Attributes:
        never_steps: steps without any gradient since the start, while other layers have one.
        later_steps: consecutive steps of exact zero for a layer that has learned before.
        repeat_steps: a lasting state is reported again each so many steps; it must be below `quiet_steps`.
        quiet_steps: steps without a breach after which the episode resolves.
    """

    never_steps: int = 20
    later_steps: int = 50
    repeat_steps: int = 10
    quiet_steps: int = 20


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    names: tuple[str, ...] = ()
    last_step: int = -1
    quiet: bytes = b""
    """Little-endian int32 (L,): consecutive steps in which a layer had no gradient other than zero."""
    alive: bytes = b""
    """uint8 (L,): whether a layer ever had a gradient other than zero."""
    num_dead: int = 0
    breach_step: int = -1


class DeadLayer:
    """See the module's first lines."""

    name = "dead_layer"

    def __init__(self, defaults: DeadLayerDefaults | None = None) -> None:
        self._defaults = defaults or DeadLayerDefaults()
        self.quiet_steps = self._defaults.quiet_steps
        self._state = _State()
        self._quiet_L: NDArray[np.int32] = np.zeros(0, np.int32)
        self._alive_L: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def observe(self, item: FoldedStep, history: LayerHistory) -> list[Breach]:
        """A breach when layers are found dead, when more die, and each `repeat_steps` while they are."""
        if isinstance(item, FoldedLayers):
            return self._take_layers(item)
        return []

    def needs_all(self, block: FoldedBlock) -> bool:
        """See `base.Rule`."""
        return False

    def dump(self) -> bytes:
        """State as msgpack."""
        self._state.quiet = self._quiet_L.astype("<i4").tobytes()
        self._state.alive = self._alive_L.astype(np.uint8).tobytes()
        return msgspec.msgpack.encode(self._state)

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        state = msgspec.msgpack.decode(data, type=_State)
        if state.version == _VERSION:
            self._state = state
            self._quiet_L = np.frombuffer(state.quiet, "<i4").astype(np.int32)
            self._alive_L = np.frombuffer(state.alive, np.uint8).astype(np.bool_)

    def _take_layers(self, item: FoldedLayers) -> list[Breach]:
        # Hot path: a few operations on whole arrays, no loop over layers.
        if item.layout.names != self._state.names:
            self._state = _State(names=item.layout.names)
            self._quiet_L = np.zeros(len(item.layout.names), np.int32)
            self._alive_L = np.zeros(len(item.layout.names), np.bool_)
        if item.step <= self._state.last_step:
            return []
        self._state.last_step = item.step
        # Not the fraction of zeros, which is not measured in every step: a norm of 0 says that all elements are.
        norm_L = item.statistics["norm"]
        absent_L = is_absent(norm_L)
        quiet_L = absent_L | (norm_L == 0.0)
        if quiet_L.all():
            return []  # Nothing had a gradient: rule `grad_zero` has that, it is no dead layer among living ones.
        # A layer that was alive and gets no gradient at all has been frozen on purpose; exact zeros are not chosen.
        dead_L = quiet_L & ~(absent_L & self._alive_L)
        if item.withheld is not None:
            # Absent because it is not known, which is no news of the layer.
            dead_L &= ~item.withheld
        self._quiet_L = np.where(dead_L, self._quiet_L + 1, 0).astype(np.int32)
        self._alive_L |= ~quiet_L
        limit_L = np.where(self._alive_L, self._defaults.later_steps, self._defaults.never_steps)
        return self._report(item, np.nonzero(self._quiet_L >= limit_L)[0])

    def _report(self, item: FoldedLayers, dead: NDArray[np.intp]) -> list[Breach]:
        state = self._state
        more, state.num_dead = len(dead) > state.num_dead, len(dead)
        if not len(dead) or not (more or item.step - state.breach_step >= self._defaults.repeat_steps):
            return []
        state.breach_step = item.step
        order = self._by_suspicion(item.layout.names, dead)
        first, steps = item.layout.names[order[0]], int(self._quiet_L[order[0]])
        learned = bool(self._alive_L[order[0]])
        how = (
            f"has been exactly 0 since step {item.step - steps + 1}"
            if learned
            else "has never been other than 0"
        )
        noun = "layer gets" if len(dead) == 1 else "layers get"
        return [
            Breach(
                rule=self.name,
                severity=Severity.WARNING,
                step=item.step,
                time_s=item.time_s,
                metric="layer/norm",
                value=float(steps),
                threshold=float(self._defaults.later_steps if learned else self._defaults.never_steps),
                layers=tuple(item.layout.names[index] for index in order[:MAX_NAMED_LAYERS]),
                num_layers=len(dead),
                origin="backward",
                facts=(f"the gradient of {first} {how}", f"{len(dead)} trainable {noun} no gradient"),
            )
        ]

    def _by_suspicion(self, names: tuple[str, ...], dead: NDArray[np.intp]) -> list[int]:
        """Dead layers, the likely origin first.

        Silent longest first. Then modules that are dead as a whole, in backward order: a weight next to a living
        bias only has zeros as its input, so what stopped the gradient is the module before it.
        """
        silent = set(dead.tolist())
        alive_modules = {_module(name) for index, name in enumerate(names) if index not in silent}
        return sorted(
            dead.tolist(),
            key=lambda index: (-int(self._quiet_L[index]), _module(names[index]) in alive_modules, -index),
        )


def _module(layer: str) -> str:
    """Name of the module that owns the parameter `layer`."""
    return layer.rpartition(".")[0]
