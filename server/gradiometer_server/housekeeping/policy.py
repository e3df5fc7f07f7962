"""Which runs lose what, by age and by size. Pure.

The oldest go first, and what is cheapest to miss: details of single ranks, then raw points (summaries stay), then
whole runs. A run with the tag `keep` loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gradiometer_server.settings import Retention
from gradiometer_server.store.space import RunSpace

KEEP_TAG: Final = "keep"
_DAY_S: Final = 86_400.0

Loss = Literal["detail", "thin", "delete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What a run is to lose, and why."""

    loss: Loss
    run: RunSpace
    reason: str


def due_by_age(runs: Sequence[RunSpace], retention: Retention, now_s: float) -> Iterator[Due]:
    """What is due because of the time since the last sign of life. A run that is to be deleted loses nothing before."""
    for run in _candidates(runs):
        days = (now_s - run.updated_s) / _DAY_S
        if _is_older(days, retention.delete_days):
            yield Due(loss="delete", run=run, reason=f"{days:.1f} days old")
            continue
        if _is_older(days, retention.detail_days):
            yield Due(loss="detail", run=run, reason=f"{days:.1f} days old")
        if _is_older(days, retention.thin_days) and not run.is_thinned:
            yield Due(loss="thin", run=run, reason=f"{days:.1f} days old")


def due_by_size(runs: Sequence[RunSpace], retention: Retention, used_bytes: int) -> Iterator[Due]:
    """What is due because everything together is larger than it may be; by what the runs give up, no more than needed."""
    if retention.max_bytes is None:
        return
    excess = used_bytes - retention.max_bytes
    reason = f"{used_bytes} bytes are used, {retention.max_bytes} allowed"
    losses: tuple[Loss, ...] = (
        ("detail", "thin", "delete") if retention.delete_for_space else ("detail", "thin")
    )
    lost: dict[int, int] = {}
    for loss in losses:
        for run in _candidates(runs):
            if excess <= 0:
                return
            gain = _gain(run, loss) - (lost.get(run.run_key, 0) if loss == "delete" else 0)
            if gain > 0:
                lost[run.run_key] = lost.get(run.run_key, 0) + gain
                excess -= gain
                yield Due(loss=loss, run=run, reason=reason)


def _candidates(runs: Sequence[RunSpace]) -> list[RunSpace]:
    return [run for run in runs if KEEP_TAG not in run.tags]


def _is_older(days: float, limit: float | None) -> bool:
    return limit is not None and days > limit


def _gain(run: RunSpace, loss: Loss) -> int:
    if loss == "detail":
        return run.detail_bytes
    return run.raw_bytes if loss == "thin" else run.num_bytes
