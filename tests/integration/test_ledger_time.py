"""The time ledger on real loops, in which it is known what takes how long."""

from __future__ import annotations

import pickle
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, dataloader

import gradiometer as gm
from tests.support.recorded import recorded

LOAD_S, FORWARD_S, BACKWARD_S, OPTIMIZER_S, BETWEEN_S = 0.03, 0.02, 0.04, 0.025, 0.035
SLACK_S = 0.015
"""What a busy machine may add to a sleep; a sleep is never shorter."""
PHASES = ("data_wait", "forward", "backward", "optimizer")


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(LOAD_S)
        return torch.full((4,), float(index))


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD_S)
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        time.sleep(FORWARD_S)
        return SlowBackward.apply(self.linear(x))


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(OPTIMIZER_S)
        return super().step(closure)


def steps_of(run):
    """Step -> phase -> seconds, the identity checked."""
    assert run.failures == {}
    points = recorded(run.directory).points
    found = {}
    for step, step_s in points["time/step_s"].items():
        phases = {name: points[f"time/{name}_s"][step] for name in PHASES if f"time/{name}_s" in points}
        other_s = points["time/other_s"][step]
        assert sum(phases.values()) + other_s == pytest.approx(step_s, rel=1e-12, abs=1e-12)
        assert min(phases.values()) >= 0
        assert other_s >= 0
        found[step] = phases | {"other": other_s}
    return found


def typical(found, name):
    """The smallest of the steps: what is left of it when nothing else disturbs."""
    return min(phases[name] for phases in found.values())


def assert_takes(found, name, expected_s):
    assert expected_s <= typical(found, name) < expected_s + SLACK_S, name


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_phases_take_what_they_take(micro_batches, spool):
    model = Net()
    optimizer = SlowSGD(model.parameters(), lr=1e-3)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        batches = iter(DataLoader(Slow(), batch_size=1))
        for _ in range(7):
            for _ in range(micro_batches):
                model(next(batches)).sum().backward()
            time.sleep(BETWEEN_S)
            optimizer.step()
            optimizer.zero_grad()
    found = steps_of(run)
    assert list(found) == list(range(2, 8))
    assert_takes(found, "data_wait", micro_batches * LOAD_S)
    assert_takes(found, "forward", micro_batches * FORWARD_S)
    assert_takes(found, "backward", micro_batches * BACKWARD_S)
    assert_takes(found, "optimizer", OPTIMIZER_S)
    assert_takes(found, "other", BETWEEN_S)


def test_what_is_not_training_belongs_to_the_rest(spool):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 4))
            model.train()
            with torch.no_grad():
                model(torch.ones(2, 4))
    found = steps_of(run)
    assert_takes(found, "forward", FORWARD_S)
    assert_takes(found, "other", 2 * FORWARD_S)
    assert "data_wait" not in found[2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_repeats_is_backward(reentrant, spool):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Net()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for _ in range(6):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = steps_of(run)
    assert_takes(found, "forward", FORWARD_S)
    assert_takes(found, "backward", FORWARD_S + BACKWARD_S)


def test_inside_a_closure_forward_and_backward_are_themselves(spool):
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=1)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for _ in range(6):

            def closure():
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4)).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
    found = steps_of(run)
    assert_takes(found, "forward", FORWARD_S)
    assert_takes(found, "backward", BACKWARD_S)
    assert typical(found, "optimizer") < SLACK_S


def test_the_agents_own_time_is_no_phase_of_the_training(spool, monkeypatch):
    from gradiometer.capture.gradients import GradientReader

    original = GradientReader.read

    def slow(self, *args):
        time.sleep(OPTIMIZER_S)
        return original(self, *args)

    monkeypatch.setattr(GradientReader, "read", slow)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = steps_of(run)
    assert typical(found, "optimizer") < SLACK_S
    assert_takes(found, "other", OPTIMIZER_S)
    agent = recorded(run.directory).points["agent/step_s"]
    assert min(agent[step] for step in found) >= OPTIMIZER_S


def test_a_step_of_two_optimizers_and_a_scaler_adds_up(spool):
    model = Net()
    optimizers = [SlowSGD([parameter], lr=1e-3) for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizers, scaler)
        for step in range(12):
            scale = float("inf") if step % 4 == 2 else 1.0
            scaler.scale(model(torch.full((2, 4), scale)).sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    found = steps_of(run)
    assert list(found) == list(range(2, 13))
    # The scaler left out the step of the weight, but not of the bias, whose gradient is finite.
    skipped = {3, 7, 11}
    assert_takes({step: found[step] for step in skipped}, "optimizer", OPTIMIZER_S)
    assert_takes({step: found[step] for step in set(found) - skipped}, "optimizer", 2 * OPTIMIZER_S)


def test_optimizers_in_the_backward_pass_are_themselves(spool):
    model = Net()
    for parameter in model.parameters():
        optimizer = SlowSGD([parameter], lr=1e-3)

        def step_now(_parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step_now)
        parameter._in_backward_optimizers = [optimizer]
    with gm.init(mode="offline") as run:
        run.watch(model)
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
    found = {step: phases for step, phases in steps_of(run).items() if step > 2}
    assert_takes(found, "backward", BACKWARD_S)
    assert_takes(found, "optimizer", 2 * OPTIMIZER_S)


def batches():
    for _ in range(6):
        time.sleep(LOAD_S)
        yield torch.ones(2, 4)


def test_any_loader_can_be_timed(spool):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for batch in run.data(batches()):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_takes(steps_of(run), "data_wait", LOAD_S)
    given = [1, 2]
    assert gm.init(mode="disabled").data(given) is given


def test_a_thread_that_fetches_ahead_is_not_the_training(spool):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    stop = threading.Event()

    def fetch():
        while not stop.is_set():
            next(iter(DataLoader(Slow(), batch_size=1)))

    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        thread = threading.Thread(target=fetch)
        thread.start()
        for _ in range(6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        stop.set()
        thread.join()
    found = steps_of(run)
    assert "data_wait" not in found[2]
    assert_takes(found, "forward", FORWARD_S)


def test_a_forward_pass_that_raised_ends_there(spool):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for _ in range(6):
            with pytest.raises(RuntimeError):
                model(torch.ones(2, 3))
            time.sleep(BETWEEN_S)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    found = steps_of(run)
    assert_takes(found, "other", BETWEEN_S)
    assert_takes(found, "forward", 2 * FORWARD_S)


def test_what_is_never_seen_is_said(spool):
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for _ in range(12):
            # Not the watched module itself.
            model[0](torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert set(steps_of(run)[2]) == {"backward", "optimizer", "other"}
    unavailable = recorded(run.directory).unavailable()
    assert "was not called in training mode" in unavailable["time/forward_s"]
    assert "run.data(loader)" in unavailable["time/data_wait_s"]
    assert {"time/backward_s", "time/optimizer_s", "time/other_s"}.isdisjoint(unavailable)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models(in_place, spool):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 1))
    if in_place:
        model.compile(backend="eager")
    watched = model if in_place else torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.init(mode="offline") as run:
        run.watch(watched, optimizer)
        for _ in range(6):
            watched(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert ("forward" in steps_of(run)[2]) == (not in_place)
    assert ("time/forward_s" in recorded(run.directory).unavailable()) == in_place


def test_a_watched_model_can_be_scripted_and_saved(spool):
    model = nn.Sequential(nn.Linear(4, 1))
    with gm.init(mode="offline") as run:
        run.watch(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward=False)
        with pytest.warns(DeprecationWarning, match="jit"):
            scripted = torch.jit.script(model)
        assert scripted(torch.ones(2, 4)).shape == (2, 1)
        assert pickle.loads(pickle.dumps(model))(torch.ones(2, 4)).shape == (2, 1)
    assert run.failures == {}


def test_afterwards_torch_is_as_before(spool):
    def patched():
        return (
            DataLoader.__iter__,
            dataloader._BaseDataLoaderIter.__next__,
            torch.autograd.backward,
        )

    before = patched()
    model = nn.Linear(4, 1)
    with gm.init(mode="offline") as run:
        run.watch(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        assert all(now is not then for now, then in zip(patched(), before, strict=True))
        assert model._forward_pre_hooks
        assert len(model._forward_hooks_always_called) == 1
    assert all(now is then for now, then in zip(patched(), before, strict=True))
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not model._forward_hooks_always_called
