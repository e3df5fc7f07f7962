"""Several lines as one: a band over ranks, or a group of runs, bucket by bucket.

Shape letters: B buckets of the result, M rows of all members together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.series import Buckets
from gradiometer_server.summaries.buckets import reduce_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Buckets (B, 1) of one line on an axis that all members share; `place_B` are their numbers on it."""

    place_B: NDArray[np.float64]
    x_B: NDArray[np.float64]
    smoothed_B: NDArray[np.float64] | None
    buckets: Buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Buckets of all members.

    Extremes are over all points of all members, so that none is hidden; the mean (and what is smoothed) is the mean of the
    members' means, so that each counts the same however many points it has. Counts are sums.

    Attributes:
        x_B: the smallest x of any member's.
        num_members_B: members that have a point in the bucket.
        min_member_B, max_member_B: place of a member that holds the extreme, -1 if no value is finite.
    """

    x_B: NDArray[np.float64]
    smoothed_B: NDArray[np.float64] | None
    buckets: Buckets
    num_members_B: NDArray[np.int64]
    min_member_B: NDArray[np.int64]
    max_member_B: NDArray[np.int64]


def combine(members: Sequence[Member], width: int) -> Combined:
    """Fold at least one member; `width` labels the result."""
    place_M = np.concatenate([one.place_B for one in members])
    member_M = np.repeat(np.arange(len(members)), [len(one.place_B) for one in members])
    order = np.argsort(place_M, kind="stable")
    place_M, member_M = place_M[order], member_M[order]
    starts = np.flatnonzero(
        np.concatenate([np.ones(min(1, len(place_M)), np.bool_), place_M[1:] != place_M[:-1]])
    )

    def joined(name: str) -> NDArray[Any]:
        rows: NDArray[Any] = np.concatenate([getattr(one.buckets, name) for one in members])[order]
        return rows

    min_M1, max_M1 = joined("min_BW"), joined("max_BW")
    low_B1, high_B1 = _reduced(np.fmin, min_M1, starts), _reduced(np.fmax, max_M1, starts)
    found = Buckets(
        width=width,
        first_step_B=_reduced(np.minimum, joined("first_step_B")[:, None], starts)[:, 0],
        mean_BW=_mean_of_known(joined("mean_BW"), joined("num_finite_BW") > 0, starts),
        min_BW=low_B1,
        max_BW=high_B1,
        num_finite_BW=_reduced(np.add, joined("num_finite_BW"), starts),
        num_nan_BW=_reduced(np.add, joined("num_nan_BW"), starts),
        num_pos_inf_BW=_reduced(np.add, joined("num_pos_inf_BW"), starts),
        num_neg_inf_BW=_reduced(np.add, joined("num_neg_inf_BW"), starts),
    )
    sizes = np.diff(np.append(starts, len(place_M)))
    return Combined(
        x_B=_reduced(np.minimum, np.concatenate([one.x_B for one in members])[order][:, None], starts)[:, 0],
        smoothed_B=_smoothed(members, order, starts),
        buckets=found,
        num_members_B=sizes.astype(np.int64),
        min_member_B=_holder(min_M1[:, 0], low_B1[:, 0], member_M, sizes),
        max_member_B=_holder(max_M1[:, 0], high_B1[:, 0], member_M, sizes),
    )


def _reduced(ufunc: np.ufunc, rows_M1: NDArray[Any], starts: NDArray[np.intp]) -> NDArray[Any]:
    return reduce_groups(ufunc, rows_M1, starts) if len(starts) else rows_M1[:0]


def _mean_of_known(
    mean_M1: NDArray[np.float64], known_M1: NDArray[np.bool_], starts: NDArray[np.intp]
) -> NDArray[np.float64]:
    count_B1 = _reduced(np.add, known_M1.astype(np.int64), starts)
    sizes = np.diff(np.append(starts, len(mean_M1)))
    total_M1 = np.repeat(np.maximum(count_B1, 1), sizes, axis=0)
    # Shares first: a sum could leave float64's range where the mean does not.
    sums_B1 = _reduced(np.add, np.where(known_M1, mean_M1, 0.0) / total_M1, starts)
    return np.where(count_B1 > 0, sums_B1, np.nan)


def _smoothed(
    members: Sequence[Member], order: NDArray[np.intp], starts: NDArray[np.intp]
) -> NDArray[np.float64] | None:
    each = [one.smoothed_B for one in members if one.smoothed_B is not None]
    if len(each) != len(members):
        return None
    rows_M1 = np.concatenate(each)[order][:, None]
    return _mean_of_known(rows_M1, ~np.isnan(rows_M1), starts)[:, 0]


def _holder(
    extreme_M: NDArray[np.float64],
    of_bucket_B: NDArray[np.float64],
    member_M: NDArray[np.int64],
    sizes_B: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The first member of each bucket whose extreme is the bucket's."""
    bucket_M = np.repeat(np.arange(len(sizes_B)), sizes_B)
    holding = np.flatnonzero(extreme_M == of_bucket_B[bucket_M])[::-1]
    found_B = np.full(len(sizes_B), -1, np.int64)
    found_B[bucket_M[holding]] = member_M[holding]
    return found_B
