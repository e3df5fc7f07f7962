"""What `Run.log` accepts, at which step it lands, and how it counts what it refuses."""

from __future__ import annotations

import decimal
import enum
import fractions
import math
import struct

import numpy as np
import pytest
import torch

import gradiometer as gm
from tests.support.eventually import eventually
from tests.support.recorded import recorded


def logged(*calls):
    """Record `(metrics, step)` calls in an offline run; returns what was recorded and what was dropped."""
    with gm.init(mode="offline") as run:
        for metrics, step in calls:
            run.log(metrics, step)
    assert run.failures == {}
    return recorded(run.directory), run.dropped


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, 1.5),
        (3, 3.0),
        (True, 1.0),
        (2**53, 2.0**53),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float16(2.0), 2.0),
        (np.int64(-4), -4.0),
        (np.bool_(True), 1.0),
        (np.array(5.0), 5.0),
        (fractions.Fraction(1, 4), 0.25),
        (torch.tensor(2.5), 2.5),
        (torch.tensor(7), 7.0),
        (torch.tensor(True), 1.0),
        (torch.tensor([[3.5]]), 3.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (torch.tensor(1e300, dtype=torch.float64), 1e300),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (5e-324, 5e-324),
        (-0.0, -0.0),
    ],
)
def test_numbers_of_every_kind(value, expected, spool):
    out, dropped = logged(({"x": value}, None))
    assert struct.pack("<d", out.points["x"][0]) == struct.pack("<d", expected)
    assert dropped == {}


def test_nan_is_a_value_and_none_is_its_absence(spool):
    out, dropped = logged(({"nan": math.nan, "none": None, "tensor": torch.tensor(math.nan)}, None))
    assert set(out.points) == {"nan", "tensor"}
    assert all(math.isnan(series[0]) for series in out.points.values())
    assert dropped == {}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "a value is not a number"),
        ([1.0], "a value is not a number"),
        (decimal.Decimal("1.5"), "a value is not a number"),
        (1 + 2j, "a value is not a number"),
        (10**400, "a value is not a number"),
        (np.ones(3), "a value is not a number"),
        (torch.ones(3), "a tensor does not have exactly one element"),
        (torch.empty(0), "a tensor does not have exactly one element"),
        (torch.tensor(1j), "a tensor's value cannot be read"),
        (torch.tensor(1.0, device="meta"), "a tensor's value cannot be read"),
    ],
)
def test_what_is_not_a_number_is_counted_and_costs_only_itself(value, reason, spool, caplog):
    out, dropped = logged(({"bad": value, "good": 1.0}, None), ({"bad": value}, None))
    assert out.points == {"good": {0: 1.0}}
    assert dropped == {reason: 2}
    assert len([text for text in caplog.messages if "dropped a report" in text]) == 1
    assert sum(event.attributes["reports"] for event in out.of_kind("dropped")) == 2


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 501, "\ud800"])
def test_names_that_cannot_travel(name, spool):
    out, dropped = logged(({name: 1.0, "ok": 2.0}, None))
    assert out.points == {"ok": {0: 2.0}}
    assert dropped == {"a metric name is not valid": 1}


@pytest.mark.parametrize("name", ["x" * 500, "потери/обучение", "损失", "a b", "%/?#", "🔥"])
def test_names_in_any_script(name, spool):
    assert logged(({name: 1.0}, None))[0].points == {name: {0: 1.0}}


@pytest.mark.parametrize("step", [-1, 2**53, 1.5, "3", True, math.nan])
def test_steps_that_are_none(step, spool):
    out, dropped = logged(({"x": 1.0}, step), ({"x": 2.0}, 5))
    assert out.points == {"x": {5: 2.0}}
    assert dropped == {"a step is not valid": 1}


def test_steps_without_a_watch(spool):
    with gm.init(mode="offline") as run:
        run.log({"x": 0.0})
        run.log({"x": 1.0})
        run.log({"x": 10.0}, step=np.int64(10))
        run.log({"x": 11.0})
        assert run.step == 11
        run.log({"x": 2.0}, 2**53 - 1)
    assert recorded(run.directory).points == {"x": {0: 0.0, 1: 1.0, 10: 10.0, 11: 11.0, 2**53 - 1: 2.0}}


class Name(enum.StrEnum):
    """Equal to its text, but to `str` of a plain enumeration it would not be."""

    LOSS = "loss"


class TextOfItsOwn(str):
    """Equal to "loss", and shown as something else."""

    __slots__ = ()

    def __str__(self):
        return "shown"


@pytest.mark.parametrize("first_shown", [True, False])
def test_names_and_values_that_are_equal_are_still_told_apart(first_shown, spool):
    keys = ["loss", Name.LOSS, TextOfItsOwn("loss"), 1, True, 1.0]
    expected = {"loss": {0: 0.0, 1: 1.0}, "shown": {2: 2.0}, "1": {3: 3.0}, "True": {4: 4.0}, "1.0": {5: 5.0}}
    order = range(len(keys)) if first_shown else reversed(range(len(keys)))
    out, dropped = logged(*(({keys[index]: float(index)}, index) for index in order))
    assert out.points == expected
    assert dropped == {}


@pytest.mark.parametrize("value", [2, True, None, "2", np.float64(2.0), torch.tensor(2.0), {"x": 2.0}])
def test_the_same_names_with_another_kind_of_value(value, spool):
    calls = [({"a": 1.0, "b": 1.0}, 0), ({"a": 1.0, "b": value}, 1), ({"b": 3.0, "a": 4.0}, 2)]
    out, _ = logged(*calls)
    assert out.points["a"] == {0: 1.0, 1: 1.0, 2: 4.0}
    seen = out.points.get("b/x", {}) | out.points["b"]
    expected = {} if value in (None, "2") else {1: 1.0 if value is True else 2.0}
    assert seen == {0: 1.0, 2: 3.0} | expected


def test_more_combinations_of_names_than_are_kept(spool):
    calls = [({f"m{index % 300}": float(index), "all": 1.0}, index) for index in range(700)]
    out, dropped = logged(*calls)
    assert len(out.points["all"]) == 700
    assert out.points["m299"] == {299: 299.0, 599: 599.0}
    assert dropped == {}


def test_micro_batches_of_plain_floats_without_a_watch(spool):
    with gm.init(mode="offline") as run:
        run.log_microbatch({"x": 1.0})
        run.log_microbatch({"x": 2.0})
    assert recorded(run.directory).points == {"x": {0: 1.0, 1: 2.0}}


def test_nested_names_are_joined(spool):
    out, _ = logged(({"train": {"loss": 1.0, "per": {1: 2.0}}, "lr": 0.5}, None))
    assert out.points == {"train/loss": {0: 1.0}, "train/per/1": {0: 2.0}, "lr": {0: 0.5}}


def test_a_tensor_is_copied_when_it_is_logged(spool):
    value = torch.tensor(1.0)
    with gm.init(mode="offline") as run:
        run.log({"x": value})
        value.fill_(2.0)
    assert recorded(run.directory).points == {"x": {0: 1.0}}


def test_a_value_whose_conversion_explodes_does_not_reach_the_training(spool, caplog):
    class Trap:
        ndim = 0

        def __float__(self):
            raise MemoryError("trap")

    with gm.init(mode="offline") as run:
        run.log({"x": Trap()})
        run.log({"x": 1.0})
    assert run.failures == {"log": 1}
    assert recorded(run.directory).points["x"][max(recorded(run.directory).points["x"])] == 1.0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"exit_code": np.int64(0)}, 0),
        ({"exit_code": np.int64(3)}, 3),
        ({"exit_code": True}, 1),
        ({"exit_code": "no data"}, 1),
        ({"exit_code": None}, 0),
        ({"deadline_s": math.inf}, 0),
        ({"deadline_s": -math.inf}, 0),
        ({"deadline_s": math.nan}, 0),
        ({"deadline_s": "soon"}, 0),
        ({"deadline_s": 10**400}, 0),
    ],
)
def test_finish_closes_the_run_whatever_it_is_given(arguments, code, spool):
    run = gm.init(mode="offline")
    run.finish(**arguments)
    assert run.failures == {}
    run.finish()
    # With a deadline of 0 nobody waits for the agent's thread.
    [event] = eventually(lambda: recorded(run.directory).of_kind("exit"))
    assert event.attributes["code"] == code


def test_what_is_no_mapping_is_counted_and_told_once(spool, caplog):
    with gm.init(mode="offline") as run:
        for metrics in (5, None, "loss", [("loss", 1.0)], {"x"}):
            run.log(metrics)
        run.log({"x": 1.0})
        assert run.failures == {}
        assert run.dropped == {"what was logged is not a mapping of names to numbers": 5}
    [told] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "(5)" in told.getMessage()
    assert told.exc_info is None
    assert recorded(run.directory).points["x"] == {5: 1.0}


def test_alerts_and_marks(spool):
    with gm.init(mode="offline") as run:
        run.log({"x": 1.0}, step=4)
        run.alert("Data ran out", "shard 7 is empty", severity="error")
        run.alert("odd", severity="catastrophe")
        run.mark("evaluation")
    out = recorded(run.directory)
    first, second = out.of_kind("alert")
    assert first.attributes == {"title": "Data ran out", "text": "shard 7 is empty", "severity": "error"}
    assert first.step == 4
    assert second.attributes["severity"] == "warning"
    assert out.of_kind("marker")[0].attributes == {"name": "evaluation"}


def test_a_disabled_run_takes_everything_and_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIOMETER_SPOOL", str(tmp_path / "spool"))
    with gm.init(mode="disabled", config={"lr": 1}) as run:
        run.log({"x": object()}, step=-1)
        run.watch(None, None)
        run.alert("x")
        run.mark("x")
        run.finish()
    assert run.dropped == {}
    assert (run.id, run.url, run.step, run.config) == ("", "", 0, {"lr": 1})
    assert not (tmp_path / "spool").exists()


def test_after_finish_nothing_is_recorded_and_nothing_raised(spool):
    run = gm.init(mode="offline")
    run.finish()
    run.log({"x": 1.0})
    run.watch(torch.nn.Linear(1, 1), None)
    run.finish(1)
    out = recorded(run.directory)
    assert out.points == {}
    assert [event.attributes["code"] for event in out.of_kind("exit")] == [0]
