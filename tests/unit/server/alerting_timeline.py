"""Builds folded items for tests of the alert rules, and runs them through an engine.

A timeline is a list of folded items in the order in which the fold would hand them on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradiometer_server.alerting.engine import AlertEngine
from gradiometer_server.domain.absent import ABSENT
from gradiometer_server.domain.alerts import Episode
from gradiometer_server.domain.folded import Folded, FoldedEvent, FoldedLayers, FoldedScalars, Layout

LAYERS = (
    "embed.weight",
    "blocks.0.attn.weight",
    "blocks.0.mlp.weight",
    "blocks.1.attn.weight",
    "head.weight",
)
LAYOUT = Layout(layout_id=1, names=LAYERS, numels=(64, 256, 256, 256, 64))


def scalars(
    step: int,
    values: Mapping[str, float],
    *,
    by_rank: Mapping[str, Mapping[int, float]] | None = None,
    attempt: int = 1,
) -> FoldedScalars:
    return FoldedScalars(
        attempt=attempt, step=step, time_s=1000.0 + step, values=dict(values), by_rank=by_rank or {}
    )


def event(step: int | None, kind: str, *, rank: int = 0, attempt: int = 1, **attributes: Any) -> FoldedEvent:
    return FoldedEvent(
        attempt=attempt, rank=rank, kind=kind, time_s=1000.0 + (step or 0), step=step, attributes=attributes
    )


def layers(
    step: int,
    norms: Sequence[float | None] = (1.0, 1.0, 1.0, 1.0, 1.0),
    *,
    nonfinite: Mapping[str, int] | None = None,
    zero: Iterable[str] = (),
    ranks: Mapping[int, Iterable[str]] | None = None,
    layout: Layout = LAYOUT,
    attempt: int = 1,
) -> FoldedLayers:
    """Layer statistics of one step; a norm of None: the layer had no gradient.

    Args:
        nonfinite: layer -> number of non-finite elements; its norm becomes NaN.
        zero: layers whose gradient is exactly zero.
        ranks: rank -> layers with a non-finite element on that rank.
    """
    norm_L = np.array([ABSENT if norm is None else norm for norm in norms])
    absent_L = np.array([norm is None for norm in norms])
    zero_L, count_L = np.zeros(len(norms)), np.zeros(len(norms))
    for name, count in (nonfinite or {}).items():
        count_L[layout.names.index(name)], norm_L[layout.names.index(name)] = count, np.nan
    for name in zero:
        zero_L[layout.names.index(name)], norm_L[layout.names.index(name)] = 1.0, 0.0
    zero_L[absent_L] = count_L[absent_L] = ABSENT
    by_rank = {
        rank: np.array([int(name in names) for name in layout.names], np.int64)
        for rank, names in ((rank, set(bad)) for rank, bad in (ranks or {}).items())
    }
    return FoldedLayers(
        attempt=attempt,
        step=step,
        time_s=1000.0 + step,
        layout=layout,
        statistics={"norm": norm_L, "zero_fraction": zero_L, "num_nonfinite": count_L, "abs_max": norm_L},
        num_nonfinite_by_rank=by_rank,
        expected=len(norms),
        seen=len(norms),
    )


def healthy_step(
    step: int, *, norm: float = 1.0, loss: float = 2.0, skipped: float | None = None, scale: float = 65536.0
) -> list[Folded]:
    """One ordinary step as the agent sends it: layers, the norm derived from them, then the step's scalars."""
    values = {"train/loss": loss, "time/step_s": 0.1}
    if skipped is not None:
        values |= {"scaler/skipped": skipped, "scaler/scale": scale}
    share = norm / np.sqrt(len(LAYERS))
    return [layers(step, [share] * len(LAYERS)), scalars(step, {"grad/norm": norm}), scalars(step, values)]


def healthy(first: int, last: int, **options: Any) -> list[Folded]:
    """Ordinary steps first..last: the loss falls, the norm has a little noise so that its deviation is not zero."""
    items: list[Folded] = []
    for step in range(first, last + 1):
        loss = 2.0 + 1.0 / (1.0 + 0.01 * step)
        items += healthy_step(step, **{"norm": 1.0 + 0.05 * ((step * 7) % 5 - 2), "loss": loss, **options})
    return items


def run(items: Iterable[Folded], engine: AlertEngine | None = None) -> dict[str, Episode]:
    """Newest form of every episode by id, in the order of opening.

    A fresh engine must say the same of a run whose other statistics than norms are read in one step of 50.
    """
    if engine is None:
        items = list(items)
        found = _run(items, AlertEngine.restore([], []))
        assert _run([at_cadence(item) for item in items], AlertEngine.restore([], [])) == found
        return found
    return _run(items, engine)


def at_cadence(item: Folded) -> Folded:
    """`item` as the fold hands it on where only norms are read in most steps."""
    if isinstance(item, FoldedLayers) and item.step % 50 != 1:
        kept = {name: item.statistics[name] for name in ("norm", "num_nonfinite")}
        return replace(item, statistics=kept)
    return item


def _run(items: Iterable[Folded], engine: AlertEngine) -> dict[str, Episode]:
    found: dict[str, Episode] = {}
    for item in items:
        for episode in engine.observe(item):
            found[episode.alert_id] = episode
    return found


def only(items: Iterable[Folded]) -> Episode:
    """The one episode that a timeline raises."""
    found = run(items)
    assert len(found) == 1, f"expected one episode, got {sorted(found)}"
    return next(iter(found.values()))
