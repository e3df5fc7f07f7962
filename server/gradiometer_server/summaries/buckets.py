"""Buckets of points: made from points, merged from finer buckets, packed as the summary of a chunk.

A bucket covers `width` consecutive steps, from a multiple of `width`, which is a power of two: a finer bucket thus lies
wholly inside one coarser bucket, and merging loses no extreme and moves none to a neighbour.

Shape letters: N points, B buckets, W width of a series (columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.series import Buckets
from gradiometer_server.summaries import codec

POINTS_PER_WINDOW: Final = 64
"""About so many points share one window of a chunk's summary: 0.3 bytes a value more, 64 times less to read."""
_WIDE: Final = 8


def group_starts(steps_N: NDArray[np.int64], width: int) -> NDArray[np.intp]:
    """Where each bucket's points begin (B,), for rising steps."""
    bucket_N = steps_N >> (width.bit_length() - 1)
    return np.concatenate([np.zeros(1, np.intp), np.flatnonzero(bucket_N[1:] != bucket_N[:-1]) + 1])[
        : len(steps_N)
    ]


def reduce_groups(ufunc: np.ufunc, values_NW: NDArray[Any], starts_B: NDArray[np.intp]) -> NDArray[Any]:
    """Reduce the rows of each group (B, W).

    `reduceat` is fastest for narrow arrays and twenty times too slow for wide ones; there, groups of equal size are
    reduced through a reshape.
    """
    if values_NW.shape[1] < _WIDE or len(starts_B) < 4:
        return np.asarray(ufunc.reduceat(values_NW, starts_B, axis=0))
    sizes = np.diff(starts_B)
    inner = int(sizes[1])
    if not (sizes[1:] == inner).all():
        return np.asarray(ufunc.reduceat(values_NW, starts_B, axis=0))
    first, last = int(starts_B[1]), int(starts_B[-1])
    middle = values_NW[first:last].reshape(-1, inner, values_NW.shape[1])
    return np.concatenate(
        [
            ufunc.reduce(values_NW[:first], axis=0)[None],
            ufunc.reduce(middle, axis=1),
            ufunc.reduce(values_NW[last:], axis=0)[None],
        ]
    )


def bucketise(steps_N: NDArray[np.int64], values_NW: NDArray[np.float64], width: int) -> Buckets:
    """Buckets of `width` steps from points with strictly rising steps >= 0."""
    return reduce_to_buckets(steps_N, values_NW, width, group_starts(steps_N, width))


def reduce_to_buckets(
    steps_N: NDArray[np.int64], values_NW: NDArray[np.float64], width: int, starts: NDArray[np.intp]
) -> Buckets:
    """Buckets of points in any order of steps: each begins at one of `starts` (B,). `width` is a label."""
    if len(steps_N) == 0:
        return empty(width, values_NW.shape[1])
    finite_NW = np.isfinite(values_NW)
    if finite_NW.all():
        return _of_finite(steps_N, values_NW, width, starts)
    count_BW = _count(finite_NW, starts)
    nan_NW = np.isnan(values_NW)
    known_NW = np.where(finite_NW, values_NW, np.nan)
    return Buckets(
        width=width,
        first_step_B=steps_N[starts],
        mean_BW=_mean(np.where(finite_NW, values_NW, 0.0), count_BW, starts),
        min_BW=reduce_groups(np.fmin, known_NW, starts),
        max_BW=reduce_groups(np.fmax, known_NW, starts),
        num_finite_BW=count_BW,
        num_nan_BW=_count(nan_NW & ~is_absent(values_NW), starts),
        num_pos_inf_BW=_count(values_NW == np.inf, starts),
        num_neg_inf_BW=_count(values_NW == -np.inf, starts),
    )


def _of_finite(
    steps_N: NDArray[np.int64], values_NW: NDArray[np.float64], width: int, starts: NDArray[np.intp]
) -> Buckets:
    sizes_B1 = np.diff(np.append(starts, len(steps_N)))[:, None].astype(np.int64)
    count_BW = np.broadcast_to(sizes_B1, (len(starts), values_NW.shape[1]))
    none_BW = np.broadcast_to(np.int64(0), count_BW.shape)
    return Buckets(
        width=width,
        first_step_B=steps_N[starts],
        mean_BW=_mean(values_NW, count_BW, starts),
        min_BW=reduce_groups(np.minimum, values_NW, starts),
        max_BW=reduce_groups(np.maximum, values_NW, starts),
        num_finite_BW=count_BW,
        num_nan_BW=none_BW,
        num_pos_inf_BW=none_BW,
        num_neg_inf_BW=none_BW,
    )


def _count(mask_NW: NDArray[np.bool_], starts: NDArray[np.intp]) -> NDArray[np.int64]:
    return reduce_groups(np.add, mask_NW.astype(np.int64), starts)


def _mean(
    values_NW: NDArray[np.float64], count_BW: NDArray[np.int64], starts: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Mean over finite values; `values_NW` holds 0 where there is none."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean_BW: NDArray[np.float64] = reduce_groups(np.add, values_NW, starts) / count_BW
        if not np.isinf(mean_BW).any() and not (np.isnan(mean_BW) & (count_BW > 0)).any():
            return mean_BW
        # The sum left float64's range although the mean cannot: divide before adding.
        sizes = np.diff(np.append(starts, len(values_NW)))
        shares_NW = values_NW / np.repeat(np.maximum(count_BW, 1), sizes, axis=0)
        return np.where(count_BW > 0, reduce_groups(np.add, shares_NW, starts), np.nan)


def merge(parts: Sequence[Buckets], width: int) -> Buckets:
    """Buckets of `width` steps from finer ones (each part's own width divides `width`), given in any order.

    Parts may share a bucket: counts add up, extremes combine, means are weighted by their counts.
    """
    parts = [part for part in parts if len(part.first_step_B)]
    if not parts:
        raise ValueError("nothing to merge")
    joined = parts[0] if len(parts) == 1 else _join(parts)
    steps = joined.first_step_B
    return merge_rows(joined, width, group_starts(steps, width))


def merge_rows(joined: Buckets, width: int, starts: NDArray[np.intp]) -> Buckets:
    """Neighbouring buckets as one, each group beginning at one of `starts` (B,). `width` labels the result."""
    steps = joined.first_step_B
    if len(starts) == len(steps):
        return _with_width(joined, width)
    count_BW = reduce_groups(np.add, joined.num_finite_BW, starts)
    return Buckets(
        width=width,
        first_step_B=steps[starts],
        mean_BW=_weighted_mean(joined, count_BW, starts),
        min_BW=reduce_groups(np.fmin, joined.min_BW, starts),
        max_BW=reduce_groups(np.fmax, joined.max_BW, starts),
        num_finite_BW=count_BW,
        num_nan_BW=reduce_groups(np.add, joined.num_nan_BW, starts),
        num_pos_inf_BW=reduce_groups(np.add, joined.num_pos_inf_BW, starts),
        num_neg_inf_BW=reduce_groups(np.add, joined.num_neg_inf_BW, starts),
    )


def _weighted_mean(
    joined: Buckets, count_BW: NDArray[np.int64], starts: NDArray[np.intp]
) -> NDArray[np.float64]:
    sizes = np.diff(np.append(starts, len(joined.first_step_B)))
    total_NW = np.repeat(np.maximum(count_BW, 1), sizes, axis=0)
    known_NW = np.where(joined.num_finite_BW > 0, joined.mean_BW, 0.0)
    # Weights first: mean * count could leave float64's range.
    sums_BW = reduce_groups(np.add, known_NW * (joined.num_finite_BW / total_NW), starts)
    return np.where(count_BW > 0, sums_BW, np.nan)


def _join(parts: Sequence[Buckets]) -> Buckets:
    """All parts one after the other, by first step."""
    steps = np.concatenate([part.first_step_B for part in parts])
    order = None if (steps[1:] >= steps[:-1]).all() else np.argsort(steps, kind="stable")

    def joined(name: str) -> NDArray[Any]:
        rows = np.concatenate([getattr(part, name) for part in parts])
        return rows if order is None else rows[order]

    return Buckets(width=parts[0].width, **{name: joined(name) for name in _ARRAYS})


_ARRAYS: Final = (
    "first_step_B", "mean_BW", "min_BW", "max_BW", "num_finite_BW", "num_nan_BW", "num_pos_inf_BW", "num_neg_inf_BW",
)  # fmt: skip


def reordered(rows: Buckets, order: NDArray[np.intp]) -> Buckets:
    """The same buckets in another order."""
    return Buckets(width=rows.width, **{name: getattr(rows, name)[order] for name in _ARRAYS})


def _with_width(buckets: Buckets, width: int) -> Buckets:
    return Buckets(width=width, **{name: getattr(buckets, name) for name in _ARRAYS})


def empty(width: int, columns: int) -> Buckets:
    """No buckets at all."""
    reals, counts = np.empty((0, columns)), np.empty((0, columns), np.int64)
    return Buckets(
        width=width, first_step_B=np.empty(0, np.int64), mean_BW=reals, min_BW=reals, max_BW=reals,
        num_finite_BW=counts, num_nan_BW=counts, num_pos_inf_BW=counts, num_neg_inf_BW=counts,
    )  # fmt: skip


def window_width(steps_N: NDArray[np.int64]) -> int:
    """Width of a chunk's summary windows: the smallest power of two that makes at most one per 64 points, plus one.

    It never exceeds the smallest aligned interval that holds all the steps. A function of the steps alone, so that
    a chunk written again has the same bytes.
    """
    first, last = int(steps_N[0]), int(steps_N[-1])
    most = -(-len(steps_N) // POINTS_PER_WINDOW) + 1
    shift = 0
    while (last >> shift) - (first >> shift) + 1 > most:
        shift += 1
    return 1 << shift


def _record(real: str, columns: int) -> np.dtype[Any]:
    """One window in a packed summary. Counts fit 16 bits, because a chunk holds at most 4096 points."""
    shape = (columns,)
    return np.dtype(
        [
            ("first_step", "<i8"), ("min", real, shape), ("max", real, shape), ("mean", "<f8", shape),
            ("finite", "<u2", shape), ("nan", "<u2", shape), ("pos_inf", "<u2", shape), ("neg_inf", "<u2", shape),
        ]
    )  # fmt: skip


def encode_summary(windows: Buckets, *, narrow: bool) -> bytes:
    """Pack a chunk's windows; `narrow`: the chunk's values are all float32, so the extremes are too."""
    columns = windows.mean_BW.shape[1]
    record = _record("<f4" if narrow else "<f8", columns)
    rows_B = np.zeros(len(windows.first_step_B), record)
    rows_B["first_step"] = windows.first_step_B
    rows_B["min"], rows_B["max"], rows_B["mean"] = windows.min_BW, windows.max_BW, windows.mean_BW
    rows_B["finite"], rows_B["nan"] = windows.num_finite_BW, windows.num_nan_BW
    rows_B["pos_inf"], rows_B["neg_inf"] = windows.num_pos_inf_BW, windows.num_neg_inf_BW
    return codec.pack_bytes(rows_B.tobytes())


def decode_summaries(blobs: Sequence[bytes], *, width: int, columns: int, narrow: bool) -> Buckets:
    """Windows of several chunks of one series, joined; all of the same item type. Raises `CorruptData`.

    `width` is what the result is labelled with: the largest of the chunks' window widths.
    """
    record = _record("<f4" if narrow else "<f8", columns)
    raw = [codec.unpack_bytes(blob) for blob in blobs]
    if any(not part or len(part) % record.itemsize for part in raw):
        raise codec.CorruptData("a summary does not consist of whole windows")
    rows_B = np.frombuffer(b"".join(raw), record)
    return Buckets(
        width=width,
        first_step_B=rows_B["first_step"].astype(np.int64),
        mean_BW=np.ascontiguousarray(rows_B["mean"]),
        min_BW=rows_B["min"].astype(np.float64),
        max_BW=rows_B["max"].astype(np.float64),
        num_finite_BW=rows_B["finite"].astype(np.int64),
        num_nan_BW=rows_B["nan"].astype(np.int64),
        num_pos_inf_BW=rows_B["pos_inf"].astype(np.int64),
        num_neg_inf_BW=rows_B["neg_inf"].astype(np.int64),
    )
