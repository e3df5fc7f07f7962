"""Smoothing, buckets over any x axis, and folding lines together, each against a loop that takes its time."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradiometer_server.summaries import axis, buckets
from gradiometer_server.summaries.combine import Member, combine
from gradiometer_server.summaries.smoothing import MAX_WEIGHT, debiased_ema, lead_in

odd = st.sampled_from([math.nan, math.inf, -math.inf])
finite = st.floats(allow_nan=False, allow_infinity=False)
small = st.floats(-1e6, 1e6)


def slow_ema(values: list[float], weight: float) -> list[float]:
    last, seen, out = 0.0, 0, []
    for value in values:
        if math.isfinite(value):
            seen += 1
            last = last * weight + (1 - weight) * value
            out.append(last / (1 - weight**seen))
        else:
            out.append(math.nan)
    return out


@given(st.lists(small | odd, max_size=300), st.sampled_from([0.0, 0.1, 0.5, 0.6, 0.9, 0.99, 0.999]))
def test_smoothing_is_the_recursion(values: list[float], weight: float) -> None:
    found = debiased_ema(np.array(values, np.float64), weight)
    size = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    np.testing.assert_allclose(found, slow_ema(values, weight), rtol=1e-9, atol=1e-9 * size + 1e-300)


@pytest.mark.parametrize("weight", [1e-310, 1e-9, 0.1, 0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("huge", [1e30, 1e300])
def test_a_huge_value_is_forgotten_no_sooner_than_by_the_recursion(weight: float, huge: float) -> None:
    values = [1.0 + step % 2 for step in range(9000)]
    values[100] = huge
    np.testing.assert_allclose(debiased_ema(np.array(values), weight), slow_ema(values, weight), rtol=1e-9)


def test_a_huge_value_before_a_range_is_remembered_in_it() -> None:
    values = np.where(np.arange(2000) % 2, 2.0, 1.0)
    values[100] = 3e38
    whole = debiased_ema(values, 0.9)
    for begin in (500, 900, 1300, 1500):
        part = debiased_ema(values[max(0, begin - lead_in(0.9)) :], 0.9)
        np.testing.assert_allclose(part[-(2000 - begin) :], whole[begin:], rtol=1e-9)


@given(st.lists(finite, min_size=1, max_size=50), st.floats(0, MAX_WEIGHT))
def test_an_average_is_never_beyond_what_it_averages(values: list[float], weight: float) -> None:
    found = debiased_ema(np.array(values), weight)
    assert np.isfinite(found).all()
    assert min(values) <= found.min()
    assert found.max() <= max(values)
    assert found[0] == values[0] or math.isclose(found[0], values[0], rel_tol=1e-9)


@pytest.mark.parametrize("weight", [0.5, 0.9, 0.99])
def test_what_lies_before_the_lead_in_no_longer_matters(weight: float) -> None:
    values = np.random.default_rng(1).normal(size=3 * lead_in(weight) + 50)
    whole = debiased_ema(values, weight)
    begin = len(values) - 50
    np.testing.assert_allclose(
        debiased_ema(values[begin - lead_in(weight) :], weight)[-50:], whole[begin:], rtol=1e-12
    )


@given(st.lists(finite, min_size=1, max_size=60), st.integers(4, 40))
@example([-5e-324, 1e308, -1e308, 0.0], 4)
@example([5e-324, 1e-323, 1.5e-323, 2e-323, 2.5e-323], 4)
@example([1e16, 1e16 + 2, 1e16 + 4, 1e16 + 8, 1e16 + 100], 4)
def test_every_x_is_inside_its_bucket(xs: list[float], most: int) -> None:
    x_N = np.array(xs)
    width = axis.axis_width(min(xs), max(xs), most)
    assert math.frexp(width)[0] == 0.5
    places = axis.places(x_N, width)
    assert len(set(places.tolist())) <= most
    for x, place in zip(xs, places.tolist(), strict=True):
        begin = Fraction(place) * Fraction(width)
        assert begin <= Fraction(x) < begin + Fraction(width)


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=60), st.integers(4, 20))
def test_edges_stay_where_they_are_as_a_run_grows(xs: list[float], most: int) -> None:
    xs = sorted(xs)
    before = 0.0
    for count in range(2, len(xs) + 1):
        width = axis.axis_width(xs[0], xs[count - 1], most)
        # Powers of two that only grow, all counted from zero: each edge of the wider buckets was one before.
        assert width >= before
        before = width if xs[count - 1] > xs[0] else 0.0


points = st.lists(st.tuples(st.integers(0, 30), small | odd), max_size=20)


@given(st.lists(points, min_size=1, max_size=5), st.integers(0, 4))
def test_folded_lines_keep_every_extreme_and_count(lines: list[list[tuple[int, float]]], shift: int) -> None:
    width = 1 << shift
    members, expected = [], {}
    for number, line in enumerate(lines):
        own = dict(sorted(line))
        steps, values = np.array(list(own), np.int64), np.array(list(own.values())).reshape(-1, 1)
        found = buckets.bucketise(steps, values, width)
        place_B = (found.first_step_B // width).astype(np.float64)
        members.append(
            Member(
                place_B=place_B, x_B=found.first_step_B * 1.0, smoothed_B=found.mean_BW[:, 0], buckets=found
            )
        )
        for step, value in own.items():
            expected.setdefault(step // width, {}).setdefault(number, []).append((step, value))
    folded = combine(members, width)
    assert (folded.buckets.first_step_B // width).tolist() == sorted(expected)
    for place, key in enumerate(sorted(expected)):
        of_members = expected[key]
        known = {n: [v for _, v in some if math.isfinite(v)] for n, some in of_members.items()}
        every = [v for some in known.values() for v in some]
        assert folded.num_members_B[place] == len(of_members)
        assert folded.x_B[place] == min(s for some in of_members.values() for s, _ in some)
        assert folded.buckets.num_finite_BW[place, 0] == len(every)
        assert folded.buckets.num_nan_BW[place, 0] == sum(
            math.isnan(v) for some in of_members.values() for _, v in some
        )
        if not every:
            assert (folded.min_member_B[place], folded.max_member_B[place]) == (-1, -1)
            assert math.isnan(folded.buckets.mean_BW[place, 0])
            continue
        assert (folded.buckets.min_BW[place, 0], folded.buckets.max_BW[place, 0]) == (min(every), max(every))
        assert min(every) in known[int(folded.min_member_B[place])]
        assert max(every) in known[int(folded.max_member_B[place])]
        means = [sum(some) / len(some) for some in known.values() if some]
        assert math.isclose(
            folded.buckets.mean_BW[place, 0], sum(means) / len(means), rel_tol=1e-9, abs_tol=1e-6
        )
        assert folded.smoothed_B is not None
        assert math.isclose(folded.smoothed_B[place], sum(means) / len(means), rel_tol=1e-9, abs_tol=1e-6)
