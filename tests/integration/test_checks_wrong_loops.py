"""Each exact check finds its mistake in a real loop, says it once, with numbers, and counts on."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture.checks import coverage
from tests.support.recorded import recorded


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model):
    return nn.functional.mse_loss(model(torch.randn(6, 8)), torch.randn(6, 4))


def found(loop, **options):
    """What the checks of an offline run of `loop` said, by check: the events in order."""
    with gm.init(mode="offline", **options) as run:
        loop(run)
        directory = run.directory
    assert run.failures == {}
    events = {}
    for event in recorded(directory).of_kind("check"):
        events.setdefault(event.attributes["check"], []).append(event)
    return events


def the_only(loop, check, **options):
    events = found(loop, **options)
    assert list(events) == [check]
    for event in events[check]:
        assert {"title", "text", "advice", "severity", "metric"} <= set(event.attributes)
    return events[check]


@pytest.mark.parametrize("logged", ["as a tensor", "as a number", "not at all"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused-scaled"])
def test_a_missing_zero_grad(logged, optimizer, spool):
    def loop(run):
        model = make()
        scaler = None
        if optimizer == "sgd":
            updating = torch.optim.SGD(model.parameters(), lr=1e-3)
        else:
            updating = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        run.watch(model, updating, scaler)
        for _ in range(25):
            loss = loss_of(model)
            if logged != "not at all":
                run.log({"train/loss": loss if logged == "as a tensor" else loss.item()})
            if scaler is None:
                loss.backward()
                updating.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(updating)
                scaler.update()

    events = the_only(loop, "missing_zero_grad")
    # Armed by the first step; then at the 1st and the 10th time, not at each.
    assert [(event.step, event.attributes["count"]) for event in events] == [(2, 1), (11, 10)]
    assert events[0].attributes["severity"] == "error"
    assert "zero_grad()" in events[0].attributes["advice"]
    assert events[0].attributes["facts"]["old_gradient_abs_max"] > 0


def test_zero_grad_forgotten_only_for_one_of_two_models(spool):
    def loop(run):
        models = [make(1), make(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
        run.watch(models[0], optimizers[0])
        run.watch(models[1], optimizers[1], name="second")
        for _ in range(5):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss_of(model).backward()
                optimizer.step()
            optimizers[0].zero_grad()

    (event,) = the_only(loop, "missing_zero_grad")
    assert event.attributes["watch"] == "second"


def accumulating(run, *, counts, divisor, scale=None, reduction="mean", set_to_none=True):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    run.watch(model, optimizer, scaler)
    for count in counts:
        for _ in range(count):
            loss = nn.functional.mse_loss(model(torch.randn(6, 8)), torch.randn(6, 4), reduction=reduction)
            run.log({"train/loss": loss})
            final = loss / divisor
            (final if scaler is None else scaler.scale(final)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("scale", [None, 2.0**12])
def test_accumulation_that_is_not_divided(scale, set_to_none, spool):
    events = the_only(
        lambda run: accumulating(run, counts=[4] * 6, divisor=1, scale=scale, set_to_none=set_to_none),
        "accumulation_not_divided",
    )
    facts = events[0].attributes["facts"]
    assert (facts["micro_batches"], facts["sum_of_multipliers"]) == (4, 4.0)
    # The sentinel is chosen in the first step, and one step alone could be a special one.
    assert events[0].step == 3


@pytest.mark.parametrize("scale", [None, 2.0**12])
def test_a_last_window_that_is_not_full(scale, spool):
    counts = [4] * 5 + [2] + [4] * 3
    (event,) = the_only(
        lambda run: accumulating(run, counts=counts, divisor=4, scale=scale), "partial_accumulation"
    )
    assert event.step == 6
    assert event.attributes["severity"] == "info"
    assert event.attributes["facts"]["sum_of_multipliers"] == 0.5


def test_a_sum_that_cannot_be_proved_wrong_is_not_reported(spool):
    assert found(lambda run: accumulating(run, counts=[4] * 6, divisor=1, reduction="sum")) == {}


def clipping(run, *, clip, scale=2.0**16, fused=False):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    run.watch(model, optimizer, scaler, statistics="full")
    norms = []
    for _ in range(12):
        scaler.scale(loss_of(model)).backward()
        norms.append(
            math.sqrt(sum(float(one.grad.square().sum()) for one in model.parameters())) / scaler.get_scale()
        )
        clip(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_R07_R08_clipping_before_unscale_is_named_and_the_norm_is_unscaled(fused, spool):
    with gm.init(mode="offline") as run:
        norms = clipping(run, clip=lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0), fused=fused)
        directory = run.directory
    out = recorded(directory)
    events = out.of_kind("check")
    assert [event.attributes["check"] for event in events] == ["clip_before_unscale"] * 2
    assert [event.attributes["count"] for event in events] == [1, 10]
    first = events[0].attributes
    assert first["severity"] == "error"
    assert first["facts"] == {"bound": 1.0, "scale": 65536.0, "true_bound": 1 / 65536}
    assert "scaler.unscale_(optimizer)" in first["advice"]
    for step, norm in enumerate(norms, start=1):
        sum_squares = sum(rows[step][2] for rows in out.layers.values())
        assert math.sqrt(sum_squares) == pytest.approx(norm, rel=1e-4), "as it was before clipping, unscaled"
        assert out.points["grad/clip_norm_scaled"][step] == pytest.approx(norm * 65536, rel=1e-4)
    assert "grad/clip_norm" not in out.points


def test_clipping_by_value_before_unscale(spool):
    events = the_only(
        lambda run: clipping(run, clip=lambda parameters: nn.utils.clip_grad_value_(parameters, 0.5)),
        "clip_before_unscale",
    )
    assert events[0].attributes["facts"]["bound"] == 0.5


def test_parameters_in_no_optimizer(spool):
    def loop(run):
        model = nn.ModuleDict({"body": make(), "head": nn.Linear(4, 3), "frozen": nn.Linear(2, 2)})
        model["frozen"].requires_grad_(False)
        parameters = [*model["body"].parameters(), *model["frozen"].parameters()]
        optimizer = torch.optim.SGD(parameters, lr=1e-3)
        run.watch(model, optimizer)
        for _ in range(coverage.JUDGED_AFTER):
            model["head"](model["body"](torch.randn(6, 8))).square().mean().backward()
            optimizer.step()
            model.zero_grad()

    (event,) = the_only(loop, "parameter_not_in_optimizer")
    assert event.attributes["facts"] == {
        "parameters": 2,
        "elements": 4 * 3 + 3,
        "names": ["head.weight", "head.bias"],
        "frozen_in_optimizer": 2,
    }
    assert "head.weight" in event.attributes["title"]


def test_an_optimizer_with_copies_of_the_parameters_is_not_judged(spool):
    with gm.init(mode="offline") as run:
        model = make()
        copies = [one.detach().clone().requires_grad_() for one in model.parameters()]
        optimizer = torch.optim.SGD(copies, lr=1e-3)
        run.watch(model, optimizer)
        for _ in range(coverage.JUDGED_AFTER):
            for one in copies:
                one.grad = torch.ones_like(one)
            optimizer.step()
        directory = run.directory
    out = recorded(directory)
    assert out.of_kind("check") == []
    assert "not checked" in out.unavailable()["check/parameter_not_in_optimizer"]


@pytest.mark.parametrize("state", ["not loaded", "loaded, but with count 0"])
def test_an_optimizer_that_starts_anew_in_a_continued_run(state, spool):
    def loop(run):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.watch(model, optimizer)
        if state != "not loaded":
            for one in model.parameters():
                optimizer.state[one] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(one),
                    "exp_avg_sq": torch.zeros_like(one),
                }
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    (event,) = the_only(loop, "optimizer_state_reset", start_step=700)
    assert event.step == 701
    assert event.attributes["facts"] == {"start_step": 700, "optimizer_steps": 0.0}


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_scaler_that_watch_was_not_given(fused, spool):
    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu")
        run.watch(model, optimizer)
        for _ in range(6):
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    (event,) = the_only(loop, "scaler_not_given")
    assert event.step == 1


def test_R69_a_learning_rate_of_0_while_training_goes_on(spool):
    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer)
        for step in range(100):
            if step == 80:
                optimizer.param_groups[0]["lr"] = 0.0
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    (event,) = the_only(loop, "learning_rate_zero")
    assert (event.step, event.attributes["severity"]) == (90, "warning")
    assert event.attributes["facts"] == {"first_step": 81, "steps": 10}


def test_no_step_is_seen_because_the_optimizer_was_made_anew(spool):
    def loop(run):
        model = make()
        run.watch(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        other = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(12):
            loss = loss_of(model)
            loss.backward()
            other.step()
            other.zero_grad()
            run.log({"train/loss": loss.detach()})

    (event,) = the_only(loop, "no_step_seen")
    assert event.attributes["facts"] == {"losses_logged": 12}


def test_no_step_is_not_told_when_the_run_fails(spool):
    run = gm.init(mode="offline")
    model = make()
    run.watch(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(12):
        run.log({"train/loss": 1.0})
    directory = run.directory
    run.finish(1)
    assert recorded(directory).of_kind("check") == []


def test_checks_can_be_switched_off_and_then_nothing_is_hooked(spool):
    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run.watch(model, optimizer, checks=False)
        for _ in range(60):
            loss = loss_of(model)
            run.log({"train/loss": loss})
            assert not loss._backward_hooks
            loss.backward()
            optimizer.step()
        assert not any(one._backward_hooks for one in model.parameters())

    assert found(loop) == {}


def test_what_cannot_be_checked_is_said(spool):
    with gm.init(mode="offline") as run:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer)
        for _ in range(50):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log({"train/loss": loss.item()})
        directory = run.directory
    said = recorded(directory).unavailable()
    assert "not checked" in said["check/accumulation"]
    assert "before backward()" in said["check/accumulation"]
    assert "check/missing_zero_grad" not in said, "that one needs no loss"


def test_nothing_is_kept_of_a_logged_loss_and_the_model_is_left_as_it_was(spool):
    with gm.init(mode="offline") as run:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer)
        seen = []
        for _ in range(3):
            activation = model(torch.randn(6, 8))
            loss = activation.square().mean()
            run.log({"train/loss": loss})
            seen += [weakref.ref(loss), weakref.ref(activation)]
            loss.backward()
            del loss, activation
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        assert [reference() for reference in seen] == [None] * len(seen)
        assert any(one._backward_hooks for one in model.parameters())
    assert not any(one._backward_hooks or one._post_accumulate_grad_hooks for one in model.parameters())


@pytest.mark.parametrize("clears", [True, False])
def test_a_model_compiled_after_the_hooks_has_one_graph_and_is_checked(clears, spool):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()

    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer)
        for _ in range(2):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for _ in range(6):
            loss = loss_of(compiled)
            run.log({"train/loss": loss})
            loss.backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()

    assert list(found(loop)) == ([] if clears else ["missing_zero_grad"])
    assert counter.frame_count == 1


def test_R74_one_bad_micro_batch_of_eight(spool):
    values = [1.0, 2.0, 3.0, math.nan, 4.0, 5.0, 6.0, 7.0]
    with gm.init(mode="offline") as run:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer)
        for of_step in (
            values,
            np.arange(8.0),
            [torch.tensor(float(i), requires_grad=True) for i in range(8)],
        ):
            for value in of_step:
                loss_of(model).backward()
                run.log_microbatch({"train/loss": value, "train": {"tokens": 10}})
            optimizer.step()
            optimizer.zero_grad()
        directory = run.directory
    assert run.failures == {}
    points = recorded(directory).points
    assert math.isnan(points["train/loss"][1]), "the alert for a non-finite loss sees it"
    assert points["train/loss_finite_mean"] == {1: 4.0, 2: 3.5, 3: 3.5}
    assert points["train/loss_num_nonfinite"] == {1: 1.0, 2: 0.0, 3: 0.0}
    assert points["train/loss"][2] == points["train/loss"][3] == 3.5
    assert points["train/tokens"] == {1: 10.0, 2: 10.0, 3: 10.0}


def test_R74_log_keeps_the_last_value_of_a_step(spool):
    with gm.init(mode="offline") as run:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer)
        for value in (math.nan, 2.0):
            loss_of(model).backward()
            run.log({"train/loss": value})
        optimizer.step()
        run.log_microbatch({"train/late": 1.0})
        directory = run.directory
    points = recorded(directory).points
    assert points["train/loss"] == {1: 2.0}


def test_without_watch_a_micro_batch_is_a_step(spool):
    with gm.init(mode="offline") as run:
        run.log_microbatch({"train/loss": 1.0})
        run.log_microbatch({"train/loss": 3.0})
        directory = run.directory
    assert recorded(directory).points["train/loss"] == {0: 1.0, 1: 3.0}
