"""Wherever x is only left in windows, what it may be at a step is never too narrow; of points it is exact."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradiometer_server.summaries.known_x import KnownX

xs = st.integers(-9, 9).map(float) | st.just(math.nan)


def part(points: list[tuple[int, float]], end: int) -> KnownX | None:
    """Some points as one window that reaches to `end`."""
    finite = [x for _, x in points if not math.isnan(x)]
    if not finite:
        return None
    begin = min(step for step, _ in points)
    return KnownX(
        first_M=np.array([begin]),
        last_M=np.array([end]),
        sure_M=np.array([begin if len(finite) == len(points) else end]),
        low_M=np.array([min(finite)]),
        high_M=np.array([max(finite)]),
    )


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(st.integers(0, 24), xs, min_size=1, max_size=16),
    st.dictionaries(st.integers(0, 24), st.integers(-9, 9).map(float), max_size=4),
    st.sampled_from([4, 8, 16]),
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=8),
)
@example({0: math.nan, 3: 5.0}, {1: -7.0}, 4, [True], [(0, 0)])
def test_no_x_of_a_step_is_missed(
    points: dict[int, float],
    beside: dict[int, float],
    width: int,
    pattern: list[bool],
    asked: list[tuple[int, int]],
) -> None:
    parts: list[KnownX] = [KnownX.of_points(np.empty(0, np.int64), np.empty(0))]
    groups = itertools.groupby(sorted(points.items()), key=lambda one: one[0] // width)
    is_exact = True
    for (place, some), is_thinned in zip(groups, itertools.cycle(pattern), strict=False):
        group = list(some)
        window = part(group, (place + 1) * width - 1) if is_thinned else None
        is_exact &= not is_thinned
        if window is not None:
            parts.append(window)
        if not is_thinned:
            parts.append(KnownX.of_points(np.array([s for s, _ in group]), np.array([x for _, x in group])))
    # Late points may lie inside a window, between its points.
    late = {step: x for step, x in sorted(beside.items()) if step not in points}
    parts.append(KnownX.of_points(np.array([*late], np.int64), np.array([*late.values()], np.float64)))
    known = KnownX.join(parts)
    finite = {step: x for step, x in sorted((points | late).items()) if not math.isnan(x)}
    every = [*asked, *((step, 0) for step in range(30))]
    first_Q, last_Q = (np.array(some, np.int64) for some in zip(*((a, a + n) for a, n in every), strict=True))
    low_Q, high_Q = known.between(first_Q, last_Q)
    if not finite:
        assert np.isnan(low_Q).all()
        return
    for first, last, low, high in zip(first_Q, last_Q, low_Q, high_Q, strict=True):
        true = []
        for step in range(first, last + 1):
            before = [s for s in finite if s <= step]
            true.append(finite[max(before) if before else min(finite)])
        assert low <= min(true)
        assert high >= max(true)
        if is_exact:
            assert (low, high) == (min(true), max(true))
