"""Careless and hostile use of the agent: nothing reaches the training, and nothing good is lost beside something bad."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import time
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer import wire
from gradiometer.capture import native
from tests.support.eventually import eventually
from tests.support.recorded import recorded


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__

    def __float__(self):
        raise RuntimeError("no number")

    ndim = 0


@pytest.fixture
def run(tmp_path):
    with gm.init(mode="offline", spool=tmp_path) as opened:
        yield opened


def model_and_optimizer():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def steps(model, optimizer, scaler=None, num=2):
    for _ in range(num):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


BAD_VALUES = {
    "complex64": np.complex64(1 + 2j),
    "text": np.str_("1.5"),
    "bytes": np.bytes_(b"1.5"),
    "time": np.timedelta64(3, "s"),
    "sparse": torch.ones(1).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    "meta": torch.ones((), device="meta"),
    "object": Unprintable(),
    "array": np.array(None, dtype=object),
}


@pytest.mark.parametrize("bad", BAD_VALUES.values(), ids=BAD_VALUES)
def test_one_bad_value_costs_only_itself(run, bad):
    run.log({"before": 1.0, "bad": bad, "after": Fraction(1, 2)})
    run.finish()
    out = recorded(run.directory)
    assert {name: list(points.values()) for name, points in out.points.items()} == {
        "before": [1.0],
        "after": [0.5],
    }
    assert sum(run.dropped.values()) == 1
    assert run.failures == {}


def test_a_key_without_a_text_costs_only_itself(run):
    run.log({Unprintable(): 1.0, "good": 2.0, 3: 4.0})
    run.finish()
    assert set(recorded(run.directory).points) == {"good", "3"}
    assert run.dropped == {"a metric name is not valid": 1}


def test_a_mapping_inside_itself_many_times_ends_soon(run):
    metrics = {"good": 1.0}
    metrics.update({f"again{index}": metrics for index in range(20)})
    started_s = time.monotonic()
    run.log(metrics)
    assert time.monotonic() - started_s < 1.0
    run.finish()
    assert set(recorded(run.directory).points) == {"good"}
    assert run.dropped == {"a value is not a number": 20}


def test_a_config_that_holds_itself_or_has_no_text(tmp_path):
    config = {"lr": 0.1, "odd": Unprintable(), "path": "caf\udce9"}
    config.update({f"again{index}": [config] for index in range(20)})
    with gm.init(mode="offline", spool=tmp_path, config=config) as run:
        assert run.config["lr"] == 0.1
        assert run.config["odd"] == "<Unprintable>"
        assert run.config["path"] == "caf?"
        assert run.directory is not None


@pytest.mark.parametrize("argument", ["name", "notes", "group", "project", "run_id"])
def test_text_that_utf8_cannot_carry_is_refused(tmp_path, argument):
    with pytest.raises(ValueError, match=argument):
        gm.init(mode="offline", spool=tmp_path, **{argument: "caf\udce9"})
    with pytest.raises(ValueError, match="tag"):
        gm.init(mode="offline", spool=tmp_path, tags=["caf\udce9"])


def test_alerts_and_marks_with_such_text_are_kept(run):
    run.alert("caf\udce9", "x\ud800", "info")
    run.mark("m\ud800")
    run.finish()
    out = recorded(run.directory)
    assert out.of_kind("alert")[0].attributes["title"] == "caf?"
    assert out.of_kind("marker")[0].attributes["name"] == "m?"


@pytest.mark.parametrize(
    "arguments", [("three", 10.0), (0, "soon"), (0, float("nan")), (torch.tensor(3), None)], ids=repr
)
def test_finish_closes_the_run_whatever_it_is_given(run, arguments):
    code, deadline_s = arguments
    run.finish(code, deadline_s=deadline_s)
    assert [event.kind for event in recorded(run.directory).events] == ["exit"]
    assert run.failures == {}


def test_a_run_that_hangs_on_a_model_is_copied_and_saved_with_it(run):
    model, optimizer = model_and_optimizer()
    model.run = run
    run.watch(model, optimizer)
    average = copy.deepcopy(model)
    assert average.run is run
    loaded = pickle.loads(pickle.dumps(model))
    loaded.run.log({"lost": 1.0})
    loaded.run.finish()
    steps(model, optimizer)
    assert run.step == 2
    run.finish()
    assert "lost" not in recorded(run.directory).points


def test_copies_and_pickles_are_not_watched_and_need_no_agent(run):
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    run.watch(model, optimizer, scaler, forward=True)
    steps(model, optimizer, scaler)
    for made in (
        copy.deepcopy((model, optimizer, scaler)),
        pickle.loads(pickle.dumps((model, optimizer, scaler))),
    ):
        steps(*made)
        assert made[2].step.__self__ is made[2]
    assert run.step == 2
    file = io.BytesIO()
    torch.save((model, optimizer, scaler), file)
    assert b"gradiometer" not in file.getvalue()


@pytest.mark.parametrize("flight_recorder", [False, True])
def test_a_copy_of_a_watched_model_can_be_saved_and_scripted_as_if_it_were_not(tmp_path, flight_recorder):
    """The average of weights, the best model so far: kept as a copy, saved whole, loaded where there is no agent."""
    model, optimizer = model_and_optimizer()
    x = torch.ones(2, 4)
    with gm.init(mode="offline", spool=tmp_path, flight_recorder=flight_recorder) as opened:
        opened.watch(model, optimizer)
        steps(model, optimizer)
        made = copy.deepcopy(model)
        assert copy.deepcopy(made)(x).equal(model(x))
        made = [made, pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(made))]
        assert all(b"gradiometer" not in pickle.dumps(one) for one in [model, *made])
        assert all(scripted_of(one)(x).equal(model(x)) for one in [model, *made])
        assert all(one._forward_hooks for one in [model, *made]), "scripting takes no hooks away"
        assert opened.step == 2
    assert scripted_of(made[0])(x).equal(model(x)), "after the run, too"


def scripted_of(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(model)


def test_scripting_and_tracing_a_watched_model(run):
    model, optimizer = model_and_optimizer()
    x = torch.ones(2, 4)
    # As it was, or patched already: torch keeps what another test scripted for ever, and a copy is hidden while it lives.
    before = torch.jit._recursive.get_hook_stubs
    run.watch(model, optimizer, forward=True)
    with warnings.catch_warnings():
        # torch itself calls TorchScript deprecated; what must not appear is a TracerWarning of ours.
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted, traced = torch.jit.script(model), torch.jit.trace(model, x)
    assert torch.equal(scripted(x), model(x))
    assert torch.equal(traced(x), model(x))
    assert "min" not in str(traced.inlined_graph)
    steps(model, optimizer)
    assert all(layer._forward_hooks for layer in model if isinstance(layer, nn.Linear))
    run.finish()
    assert torch.jit._recursive.get_hook_stubs is before
    assert run.failures == {}


def test_functional_transforms_of_a_watched_model(run):
    from torch.func import functional_call, grad, vmap

    model, optimizer = model_and_optimizer()
    run.watch(model, optimizer, forward=True)

    def loss(parameters, x):
        value = functional_call(model, parameters, (x,)).sum()
        run.log({"inside": value})
        return value

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    vmap(grad(loss), in_dims=(None, 0))(parameters, torch.ones(3, 4))
    steps(model, optimizer)
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    steps(model, optimizer, num=1)
    run.finish()
    assert run.failures == {}
    assert set(run.dropped) == {"a tensor's value cannot be read"}
    assert recorded(run.directory).of_kind("nonfinite_activation")[0].attributes["modules"][0] == "0"


@pytest.mark.parametrize("scaler", ["scaler", object(), 5], ids=["text", "object", "number"])
def test_something_else_than_a_scaler_is_told_and_the_rest_watched(run, scaler):
    model, optimizer = model_and_optimizer()
    run.watch(model, optimizer, scaler)
    steps(model, optimizer)
    run.finish()
    out = recorded(run.directory)
    assert run.step == 2
    assert set(out.layers["0.weight"]) == {1, 2}
    assert "GradScaler" in out.unavailable()["scaler/scale"]


def test_a_disabled_scaler_is_like_none(run):
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.watch(model, optimizer, scaler)
    steps(model, optimizer, scaler)
    run.finish()
    assert "scaler/scale" not in recorded(run.directory).unavailable()
    assert run.step == 2


@pytest.mark.parametrize("kind", [nn.ReLU, lambda: nn.LazyLinear(1)], ids=["no parameters", "lazy"])
def test_a_model_without_usable_parameters_still_has_steps(run, kind):
    _, optimizer = model_and_optimizer()
    other = model_and_optimizer()[0]
    run.watch(kind(), optimizer)
    run.log({"train/loss": 1.0})
    steps(other, optimizer)
    assert run.step == 2
    assert run.failures == {}


@pytest.mark.parametrize("url", ["http://a?b=c", "http://a#b", "http://a b", "http://a\nb", "http://a\0b"])
def test_a_url_that_no_uplink_could_use_is_refused_at_once(tmp_path, url):
    with pytest.raises(ValueError, match="address of a server"):
        gm.init(mode="offline", spool=tmp_path, url=url)


def test_what_is_logged_after_the_spool_was_deleted_is_counted(run, tmp_path):
    run.log({"x": 1.0})
    eventually(lambda: list(run.directory.glob("*.seg")), what="the first record is written")
    shutil.rmtree(run.directory)
    run.log({"x": 2.0})
    run.finish()
    # The value, and the exit event.
    assert run.dropped == {"the spool could not be written": 2}


@pytest.mark.parametrize("statistics", ["full", "norm"])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_finite_gradients_whose_squares_are_beyond_float64_are_no_trouble(
    tmp_path, monkeypatch, statistics, has_kernel
):
    if not has_kernel:
        monkeypatch.setattr(native, "load", lambda: None)
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model = nn.ParameterList([parameter])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gm.init(mode="offline", spool=tmp_path) as run:
        run.watch(model, optimizer, statistics=statistics)
        for _ in range(3):
            (parameter * 1e200).sum().backward()
            optimizer.step()
    out = recorded(run.directory)
    names = wire.STATISTICS if statistics == "full" else wire.NORM_STATISTICS
    squares, num_nonfinite = names.index("sum_squares"), names.index("num_nonfinite")
    rows = list(out.layers["0"].values())
    assert [(row[squares], row[num_nonfinite]) for row in rows] == [(float("inf"), 0.0)] * 3
    assert out.details == []
