"""Optimizers as people write them: several, unusual ones, in the backward pass; and what the numbers of a step say."""

from __future__ import annotations

import gc
import math
import warnings
import weakref

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture.statistics import COUNT, SUM, SUM_SQUARES
from tests.support.recorded import recorded


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model, index=0):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(index))
    return model(x).square().mean()


@pytest.fixture
def play(spool):
    """Run `loop(run)` in an offline run and read back what it recorded."""

    def play(loop, **options):
        with gm.init(mode="offline", **options) as run:
            loop(run)
        assert run.failures == {}
        assert run.dropped == {}
        return recorded(run.directory)

    return play


def sgd(parameters, **options):
    return torch.optim.SGD(list(parameters), **{"lr": 1e-2, **options})


def test_an_optimizer_that_rests_does_not_shift_the_steps_of_the_others(play):
    model = make()
    first, second = sgd(model[0].parameters()), sgd(model[2].parameters())

    def loop(run):
        run.watch(model, [second, first])
        for step in range(1, 5):
            loss_of(model, step).backward()
            if step != 2:
                second.step()
            first.step()
            run.log({"logged": step})
            model.zero_grad()

    out = play(loop)
    # The one who rested is known to only when the next step begins; what is logged meanwhile is of its own step.
    assert out.points["logged"] == {1: 1, 2: 2, 3: 3, 4: 4}
    assert [row[COUNT] > 0 for row in out.layers["2.weight"].values()] == [True, False, True, True]
    assert [row[COUNT] > 0 for row in out.layers["0.weight"].values()] == [True] * 4
    assert list(out.points["time/step_s"]) == [2, 3, 4]


def test_the_last_step_is_kept_though_an_optimizer_is_still_waited_for(play):
    model = make()
    used, unused = sgd(model.parameters()), sgd([nn.Parameter(torch.zeros(2))])

    def loop(run):
        run.watch(model, [used, unused])
        for step in (1, 2):
            loss_of(model, step).backward()
            used.step()
            model.zero_grad()
        assert run.step == 1

    out = play(loop)
    assert list(out.layers["0.weight"]) == [1, 2]
    assert out.points["train/lr"] == {1: 1e-2, 2: 1e-2}


class Cautious(torch.optim.SGD):
    """Calls the `step` of its base class, whose hooks then fire too once somebody made a plain SGD."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_inside_an_optimizer_steps_once(play):
    model = make()
    sgd(make(1).parameters())

    def loop(run):
        optimizer = Cautious(model.parameters(), lr=1e-2)
        run.watch(model, optimizer)
        for step in (1, 2, 3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert run.step == step

    assert list(play(loop).layers["0.weight"]) == [1, 2, 3]


def test_a_step_that_raises_leaves_the_next_one_right(play):
    model = make()

    class Broken(torch.optim.SGD):
        is_broken = False

        def step(self, closure=None):
            if self.is_broken:
                raise RuntimeError("out of memory")
            return super().step(closure)

    def loop(run):
        optimizer = Broken(model.parameters(), lr=1e-2)
        run.watch(model, optimizer)
        for step in (1, 2, 3):
            optimizer.is_broken = step == 2
            loss_of(model, step).backward()
            if step == 2:
                with pytest.raises(RuntimeError, match="out of memory"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()

    assert list(play(loop).layers["0.weight"]) == [1, 2]


@pytest.mark.parametrize("by", ["hooks", "torch"])
def test_optimizers_in_the_backward_pass_still_free_each_gradient(by, play):
    with warnings.catch_warnings():
        # torch's own use of what it deprecates.
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward

    model = make()
    gradients, alive = [], []

    def loop(run):
        if by == "torch":
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1e-2})
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(see)
            run.watch(model)
        else:
            optimizers = {parameter: sgd([parameter]) for parameter in model.parameters()}
            run.watch(model, optimizers.values())

            def hook(parameter):
                see(parameter)
                optimizers[parameter].step()
                parameter.grad = None

            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(hook)
        for step in (1, 2):
            loss_of(model, step).backward()
            gc.collect()
            alive.append(sum(gradient() is not None for gradient in gradients))
            assert run.step == step

    def see(parameter):
        if parameter.grad is not None:
            gradients.append(weakref.ref(parameter.grad))

    out = play(loop)
    assert alive == [0, 0]
    assert by == "torch" or len(gradients) == 8
    assert {name: list(rows) for name, rows in out.layers.items()} == {
        name: [1, 2] for name, _ in model.named_parameters()
    }


def test_very_many_equal_learning_rates_are_one_series(play):
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(40)]
    model = nn.ParameterList(parameters)

    def loop(run):
        optimizers = [sgd([p], lr=1e-3 if index < 39 else 1e-4) for index, p in enumerate(parameters)]
        run.watch(model, optimizers)
        for _ in range(2):
            sum(parameter.sum() for parameter in model).backward()
            for optimizer in optimizers:
                optimizer.step()

    out = play(loop)
    rates = {name: values for name, values in out.points.items() if "train/lr" in name}
    assert rates == {"train/lr": {1: 1e-3, 2: 1e-3}, "train/lr/group39": {1: 1e-4, 2: 1e-4}}
    assert "40 learning rates" in out.unavailable()["train/lr/group*"]


@pytest.mark.parametrize(
    "given", [[], {}, [object()], "adam", None], ids=["list", "dict", "object", "text", "none"]
)
def test_what_is_no_optimizer_is_told(given, play):
    out = play(lambda run: run.watch(make(), given))
    assert "a list or dict of optimizers" in out.unavailable()["grad/norm"]


def test_unwatching_a_list_ends_its_watch(play):
    model = make()
    optimizers = [sgd(model[0].parameters()), sgd(model[2].parameters())]

    def loop(run):
        run.watch(model, optimizers)
        for step in (1, 2):
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            run.unwatch(optimizers)
        assert not optimizers[0]._optimizer_step_pre_hooks

    assert list(play(loop).layers["0.weight"]) == [1]


def test_R06_norm_is_unscaled_whatever_the_scale(play):
    """The true gradient has the norm 1 in every step; the scale changes from step to step."""
    weight = nn.Parameter(torch.zeros(4))
    model = nn.ParameterList([weight])

    def loop(run):
        optimizer = sgd([weight], lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=2)
        run.watch(model, optimizer, scaler, statistics="full")
        for step in range(1, 9):
            scaler.scale((weight * 0.5).sum()).backward()
            if step == 5:
                weight.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    out = play(loop)
    scales = out.points["scaler/scale"]
    assert len(set(scales.values())) >= 3, "the scale did not change, so nothing is proved"
    norms = {step: math.sqrt(row[SUM_SQUARES]) for step, row in out.layers["0"].items() if step != 5}
    assert list(norms.values()) == [1.0] * 7
    assert out.points["scaler/skipped"][5] == 1.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_R20_a_gradient_that_was_cleared_before_anyone_asked_was_read_in_time(set_to_none, play):
    model = make()
    sums = {}

    def loop(run):
        optimizer = sgd(model.parameters())
        run.watch(model, optimizer, statistics="full")
        for step in (1, 2):
            loss_of(model, step).backward()
            sums[step] = float(model[2].weight.grad.sum())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        # Nothing is read here, where every gradient is gone or 0.
        run.log({"train/loss": 1.0})

    rows = play(loop).layers["2.weight"]
    assert {step: row[SUM] for step, row in rows.items()} == pytest.approx(sums)
    assert all(row[SUM_SQUARES] > 0 for row in rows.values())


def test_R30_a_call_without_a_step_moves_no_hidden_counter(play):
    """Without `watch` a call without a step is the step after the largest so far; a named step is taken as it is."""

    def loop(run):
        for index in range(50):
            run.log({"a": index})
            run.log({"b": index}, step=1)
        assert run.step == 1

    out = play(loop)
    assert [entry for entry in out.stream if entry[0] == "scalars"].count(("scalars", 1)) == 50, (
        "all 50 are stored"
    )
    assert out.points["b"] == {1: 49}
    assert out.points["a"] == {0: 0, **{index + 1: index for index in range(1, 50)}}


def test_R68_the_learning_rate_of_a_step_is_the_one_it_used(play):
    """Cosine with restarts, cycle 10. Weight 1, gradient 1, plain SGD: how far the weight moved is the rate that was used."""
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    used = {}

    def loop(run):
        optimizer = sgd([weight], lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=10)
        run.watch(nn.ParameterList([weight]), optimizer)
        for step in range(1, 31):
            before = weight.item()
            weight.sum().backward()
            optimizer.step()
            used[step] = before - weight.item()
            schedule.step()
            optimizer.zero_grad()

    rates = play(loop).points["train/lr"]
    assert rates == pytest.approx(used)
    assert rates[11] == rates[21] == 0.1


def test_R68_also_where_the_rate_is_a_tensor_or_the_step_ends_late(play):
    model = make()
    rate = torch.tensor(0.1)
    first = torch.optim.AdamW(model[0].parameters(), lr=rate, foreach=False)
    second = sgd(model[2].parameters(), lr=0.1)
    never = sgd([nn.Parameter(torch.zeros(1))], lr=0.5)

    def loop(run):
        run.watch(model, {"first": first, "second": second, "never": never})
        for step in range(1, 4):
            loss_of(model, step).backward()
            first.step()
            second.step()
            first.param_groups[0]["lr"].mul_(0.5)
            second.param_groups[0]["lr"] *= 0.5
            model.zero_grad()

    points = play(loop).points
    expected = {1: 0.1, 2: 0.05, 3: 0.025}
    assert points["train/lr/first"] == pytest.approx(expected)
    assert points["train/lr/second"] == pytest.approx(expected)
    assert "train/lr/never" not in points


def test_a_step_that_ends_late_says_how_things_were_when_it_stepped(play):
    """One optimizer is waited for in vain, so each step is known to be over only when the next one steps."""
    model = make()
    used, unused = sgd(model.parameters()), sgd([nn.Parameter(torch.zeros(2))])

    def loop(run):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        run.watch(model, [used, unused], scaler, forward=True)
        for step in range(1, 5):
            x = torch.full((1, 4), math.nan) if step == 3 else torch.ones(1, 4)
            scaler.scale(model(x).sum()).backward()
            scaler.step(used)
            scaler.update()
            model.zero_grad()

    out = play(loop)
    assert [
        (event.step, event.attributes["modules"][0]) for event in out.of_kind("nonfinite_activation")
    ] == [(3, "0")]
    assert out.points["scaler/scale"] == {1: 1024.0, 2: 2048.0, 3: 4096.0, 4: 2048.0}
    assert out.points["scaler/skipped"] == {1: 0.0, 2: 0.0, 3: 1.0, 4: 0.0}


def test_inside_a_cuda_graph_nothing_is_touched_and_that_is_told(play, monkeypatch):
    """There is no GPU here: the test only says that a graph is being captured, and that the model is on one."""
    model = make()
    optimizer = sgd(model.parameters())

    def loop(run):
        run.watch(model, optimizer)
        loss_of(model).backward()
        optimizer.step()
        watch = run._watches._watches[0]
        monkeypatch.setattr(watch, "_device", torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(3):
            loss_of(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert run.step == 1
        monkeypatch.setattr(watch, "_device", torch.device("cpu"))

    out = play(loop)
    assert list(out.layers["0.weight"]) == [1]
    assert "inside a CUDA graph" in out.unavailable()["grad/layers"]


def test_gradients_that_a_framework_keeps_elsewhere_are_told_as_not_collected(play):
    """As Megatron does: the gradient moves to `main_grad`, and the optimizer's own copy is stepped."""
    model = make()

    def loop(run):
        optimizer = sgd(model.parameters())
        run.watch(model, optimizer)
        for step in range(4):
            loss_of(model, step).backward()
            for parameter in model.parameters():
                parameter.main_grad, parameter.grad = parameter.grad, None
            optimizer.step()

    out = play(loop)
    assert "keeps the gradients elsewhere" in out.unavailable()["grad/norm"]
    assert out.layers["0.weight"][4][COUNT] == 0


def test_a_closure_that_raises_does_not_make_the_next_step_stale(play):
    model = make()
    sums = {}

    def loop(run):
        optimizer = sgd(model.parameters())
        run.watch(model, optimizer)

        def closure():
            loss_of(model, 1).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(closure)
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        sums[1] = model[2].weight.grad.sum().item()
        optimizer.step()

    assert play(loop).layers["2.weight"][1][SUM] == pytest.approx(sums[1])
