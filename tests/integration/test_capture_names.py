"""Names that the server would refuse, and names and parameters that two watches have in common."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer import wire
from tests.support.recorded import recorded


def train(*watched, steps=2):
    """Train models with SGD, each in a watch of its own: (model, name); returns what was recorded."""
    pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.1), name) for model, name in watched]
    with gm.init(mode="offline") as run:
        for model, optimizer, name in pairs:
            run.watch(model, optimizer, name=name)
        for _ in range(steps):
            for model, optimizer, _ in pairs:
                sum(parameter.square().sum() for parameter in model.parameters()).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert run.failures == {}
    return recorded(run.directory)


def assert_valid(out):
    for name in [*out.points, *out.layers]:
        assert wire.name_problem(name) is None


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", ["gen\n", "x" * 5000, "\ud800", " \t", "a" * 99 + "\n"])
def test_a_watch_gets_a_name_that_the_server_takes(spool, caplog, name):
    out = train((nn.Linear(2, 1), None), (nn.Linear(3, 1), name))
    assert_valid(out)
    assert sorted(len(rows) for rows in out.layers.values()) == [2, 2, 2, 2]
    rates = [metric for metric in out.points if metric.startswith("train/lr")]
    assert len(rates) == 2
    assert all(list(out.points[metric].values()) == [pytest.approx(0.1)] * 2 for metric in rates)
    told = [text for text in warnings_of(caplog) if "is called" in text]
    assert len(told) == 1
    assert "cannot be in a metric's name" in told[0]


def test_two_long_watch_names_stay_different(spool):
    out = train((nn.Linear(2, 1), "x" * 600), (nn.Linear(3, 1), "x" * 600 + "y"))
    assert len(out.layers) == 4


def test_a_watch_whose_name_is_in_use_gets_another(spool, caplog):
    out = train((nn.Linear(2, 1), "gan"), (nn.Linear(3, 1), "gan"))
    assert list(out.layers) == ["gan.weight", "gan.bias", "gan#2.weight", "gan#2.bias"]
    assert {"train/lr/gan", "train/lr/gan#2"} <= set(out.points)
    assert sum("another watch has this name" in text for text in warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("key", "shown_as"),
    [("new\nline", "d.new\\nline"), ("\x00nul", "d.\\x00nul"), ("\ud800", "d.\\ud800")],
    ids=["newline", "nul", "surrogate"],
)
def test_a_parameter_with_unprintable_characters_is_a_layer(spool, caplog, key, shown_as):
    model = nn.Module()
    model.d = nn.ParameterDict({key: torch.ones(2), "b": torch.ones(1)})
    out = train((model, None))
    assert set(out.layers) == {shown_as, "d.b"}
    assert all(len(rows) == 2 for rows in out.layers.values())
    assert sum("cannot be kept" in text for text in warnings_of(caplog)) == 1


def test_names_that_are_equal_when_cut_stay_different(spool, caplog):
    model = nn.Module()
    for end in ("", "y"):
        model.add_module("x" * 600 + end, nn.Linear(2, 1))
    out = train((model, None))
    assert_valid(out)
    assert len(out.layers) == 4
    assert all(len(name) == wire.MAX_NAME_CHARS for name in out.layers)
    assert sum("cannot be kept" in text for text in warnings_of(caplog)) == 1


def test_an_escaped_name_that_is_there_already_stays_different(spool):
    model = nn.Module()
    model.d = nn.ParameterDict({"a\\n": torch.ones(1), "a\n": torch.ones(2)})
    out = train((model, None))
    assert_valid(out)
    assert len(out.layers) == 2


def test_the_rates_of_an_optimizer_with_a_name_that_cannot_be_kept(spool):
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    optimizers = {"a\n": torch.optim.SGD(model["a"].parameters(), lr=0.1)}
    optimizers["b" * 600] = torch.optim.SGD(model["b"].parameters(), lr=0.2)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizers)
        sum(parameter.sum() for parameter in model.parameters()).backward()
        for optimizer in optimizers.values():
            optimizer.step()
    out = recorded(run.directory)
    assert_valid(out)
    rates = {name: rows[1] for name, rows in out.points.items() if name.startswith("train/lr")}
    assert list(rates.values()) == [pytest.approx(0.1), pytest.approx(0.2)]
    assert "train/lr/a\\n" in rates
    assert set(rates) <= set(out.unavailable())


def test_layers_of_two_watches_never_have_one_name(spool, caplog):
    first, second = nn.ModuleDict({"b": nn.Linear(2, 1)}), nn.Linear(3, 1)
    out = train((first, None), (second, "b"))
    assert list(out.layers) == ["b.weight", "b.bias", "b#2.weight", "b#2.bias"]
    assert out.declared["b.weight"].shape == (1, 2)
    assert out.declared["b#2.weight"].shape == (1, 3)
    told = [text for text in warnings_of(caplog) if "another watch has a layer" in text]
    assert len(told) == 1
    assert "b#2.*" in told[0]


def test_parameters_in_two_watches_are_told(spool, caplog):
    trunk = nn.Linear(2, 2)
    first = nn.ModuleDict({"trunk": trunk, "a": nn.Linear(2, 1)})
    second = nn.ModuleDict({"trunk": trunk, "b": nn.Linear(2, 1)})
    out = train((first, None), (second, "other"))
    assert len(out.layers) == 8
    told = [text for text in warnings_of(caplog) if "in two watches" in text]
    assert len(told) == 1
    assert "2 parameters" in told[0]
    assert "trunk.weight, which is other.trunk.weight too" in told[0]
    same = {name: layer.same_as for name, layer in out.declared.items() if layer.same_as}
    assert same == {"other.trunk.weight": "trunk.weight", "other.trunk.bias": "trunk.bias"}


def test_a_watch_after_another_one_has_its_names(spool, caplog):
    model = nn.Linear(2, 1)
    with gm.init(mode="offline") as run:
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.watch(model, optimizer, name="m")
            model.weight.sum().backward()
            optimizer.step()
            run.unwatch(optimizer)
    out = recorded(run.directory)
    assert list(out.layers) == ["m.weight", "m.bias"]
    assert warnings_of(caplog) == []
