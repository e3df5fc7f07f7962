"""Floats in JSON: not finite as strings, absent as null, arrays fast."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradiometer_server.domain.absent import ABSENT, ABSENT_F4
from gradiometer_server.domain.jsonable import dumps, float_to_json, floats_to_json, json_safe

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def back(value: float | str | None) -> float | None:
    return WORDS[value] if isinstance(value, str) else value


@given(st.floats() | st.none())
def test_every_float_comes_back(value: float | None) -> None:
    found = back(json.loads(dumps(float_to_json(value))))
    if value is None:
        assert found is None
    elif math.isnan(value):
        assert found is not None
        assert math.isnan(found)
    else:
        assert found == value
        assert math.copysign(1, found) == math.copysign(1, value)


@given(arrays(np.float64, st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_every_array_comes_back(values: np.ndarray) -> None:
    rows = json.loads(dumps(floats_to_json(values)))
    assert len(rows) == values.shape[0]
    for row, expected in zip(rows, values, strict=True):
        np.testing.assert_array_equal([back(item) for item in row], expected)


@pytest.mark.parametrize("mark", [ABSENT, ABSENT_F4])
def test_absent_is_null_and_nan_is_not(mark: np.floating) -> None:
    values = np.array([1.5, mark, math.nan, math.inf, -math.inf], dtype=type(mark))
    assert floats_to_json(values) == [1.5, None, "NaN", "Infinity", "-Infinity"]


def test_nan_for_want_of_values_can_be_null() -> None:
    values = np.array([math.nan, math.inf, 0.5])
    assert floats_to_json(values, nan_is_null=True) == [None, "Infinity", 0.5]


def test_configs_become_json_whatever_they_hold() -> None:
    value = {
        "lr": math.nan,
        3: [math.inf, (1, 2)],
        "nested": {"a": {1.0}},
        "b": b"x",
        "n": np.float32(0.5),
        "t": True,
    }
    assert json.loads(dumps(json_safe(value))) == {
        "lr": "NaN",
        "3": ["Infinity", [1, 2]],
        "nested": {"a": [1.0]},
        "b": "b'x'",
        "n": 0.5,
        "t": True,
    }


def test_a_chart_of_2000_buckets_encodes_in_a_few_milliseconds() -> None:
    values = np.random.default_rng(7).normal(size=(3, 2000))
    values[:, ::50] = math.nan
    best_s = min(_timed(lambda: dumps({"values": floats_to_json(values)})) for _ in range(5))
    assert best_s < 0.02


def _timed(work: object) -> float:
    before_s = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - before_s
