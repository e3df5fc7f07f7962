"""Gradient norms of each layer over the last steps: what was usual for a layer, and which one has been growing.

Shape letters: K slots kept, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.folded import FoldedLayers, Layout

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryDefaults:
    """`slots` samples of every layer, one each `stride` steps: 8 x 4 covers the last 32 steps.

    Sampling keeps the persisted state at 32 bytes per layer; a median over 8 samples is enough to rank layers by
    how far each left its own level.
    """

    slots: int = 8
    stride: int = 4
    growth_steps: int = 20


class _State(msgspec.Struct, kw_only=True):
    version: int = _VERSION
    names: tuple[str, ...] = ()
    steps: list[int] = []
    norms: list[bytes] = []
    """Little-endian float32 (L,) per slot, oldest first; NaN where a layer was absent or not finite."""


class LayerHistory:
    """Recent gradient norms per layer. Only finite values enter."""

    def __init__(self, defaults: HistoryDefaults | None = None) -> None:
        self._defaults = defaults or HistoryDefaults()
        self._state = _State()

    def add(self, item: FoldedLayers) -> None:
        """Take in the norms of one step; call it after the rules have judged the step."""
        state = self._state
        if item.layout.names != state.names:
            self._state = state = _State(names=item.layout.names)
        if state.steps and item.step < state.steps[-1] + self._defaults.stride:
            return
        norm_L = item.statistics["norm"]
        usable_L = np.isfinite(norm_L) & ~is_absent(norm_L)
        if not usable_L.any():
            return
        # A norm beyond float32 would become Inf here; the largest float32 ranks it just as well.
        capped_L = np.minimum(np.where(usable_L, norm_L, np.nan), np.finfo(np.float32).max)
        state.steps.append(item.step)
        state.norms.append(capped_L.astype("<f4").tobytes())
        del state.steps[: -self._defaults.slots], state.norms[: -self._defaults.slots]

    def median(self, layout: Layout) -> NDArray[np.float64] | None:
        """Median norm of each layer, shape (L,), NaN where nothing is known; None without history."""
        norms_KL = self._norms(layout)
        if norms_KL is None:
            return None
        counts_L = np.isfinite(norms_KL).sum(axis=0)
        median_L = np.full(norms_KL.shape[1], np.nan)
        known_L = counts_L > 0
        median_L[known_L] = np.nanmedian(norms_KL[:, known_L], axis=0)
        return median_L

    def fastest_growing(self, layout: Layout) -> tuple[str, float] | None:
        """The layer whose norm grew by the largest factor over the last 20 steps, and that factor.

        None if nothing grew by at least half, because naming a layer then would be a guess.
        """
        norms_KL = self._norms(layout)
        if norms_KL is None or len(norms_KL) < 2:
            return None
        steps = np.asarray(self._state.steps)
        start = int(np.searchsorted(steps, steps[-1] - self._defaults.growth_steps))
        first = min(start, len(steps) - 2)
        before_L, after_L = norms_KL[first], norms_KL[-1]
        known_L = np.isfinite(before_L) & np.isfinite(after_L) & (before_L > 0)
        if not known_L.any():
            return None
        growth_L = np.where(known_L, after_L / np.where(known_L, before_L, 1.0), 0.0)
        best = int(growth_L.argmax())
        return (layout.names[best], float(growth_L[best])) if growth_L[best] >= 1.5 else None

    def dump(self) -> bytes:
        """State as msgpack."""
        return msgspec.msgpack.encode(self._state)

    def load(self, data: bytes) -> None:
        """Take over a dumped state."""
        state = msgspec.msgpack.decode(data, type=_State)
        if state.version == _VERSION:
            self._state = state

    def _norms(self, layout: Layout) -> NDArray[np.float64] | None:
        if not self._state.norms or layout.names != self._state.names:
            return None
        return np.stack([np.frombuffer(row, "<f4") for row in self._state.norms]).astype(np.float64)
