"""Accelerate with the tracker: same weights, gradients before the clip and unscaled, one point per optimizer step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import gradiometer as gm
from tests.integration.framework_runs import digest, finished, marks, norms

with warnings.catch_warnings():
    # What the library and what it imports deprecate while they are imported is not our business.
    warnings.simplefilter("ignore")
    from accelerate import Accelerator

    from gradiometer.integrations.accelerate import GradiometerTracker

BATCH, COUNT = 4, 24


@pytest.fixture(autouse=True)
def ours(spool, monkeypatch):
    monkeypatch.setenv("GRADIOMETER_MODE", "offline")
    return spool


def data():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(COUNT, 6, generator=generator)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True) * 20), batch_size=BATCH
    )


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


def train(tracker, *, accumulation=1, clip=None, scaler=None, bad_step=None, **watch_options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, log_with=tracker)
    accelerator.scaler = scaler
    if tracker is not None:
        accelerator.init_trackers("not told to trackers", config={"lr": 1e-2})
    net = network()
    net, optimizer, batches = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), data())
    if tracker is not None:
        tracker.watch(accelerator, net, optimizer, **watch_options)
    for index, (inputs, targets) in enumerate(batches):
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(inputs), targets)
            if index == bad_step:
                loss = loss * float("inf")
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                if scaler is not None:
                    # What the next line does by itself with mixed_precision="fp16", which Accelerate refuses on a CPU.
                    scaler.unscale_(optimizer.optimizer)
                accelerator.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"mine": float(index)})
    accelerator.end_training()
    return accelerator, net, optimizer


def reference(accumulation, clip):
    """The same training as a plain loop: per step the mean loss and the norm before clipping."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, found, batches = [], [], list(data())
    for start in range(0, len(batches), accumulation):
        each = []
        for inputs, targets in batches[start : start + accumulation]:
            loss = nn.functional.mse_loss(net(inputs), targets)
            (loss / accumulation).backward()
            each.append(loss.item())
        losses.append(sum(each) / len(each))
        found.append(nn.utils.clip_grad_norm_(net.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, found, net


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_numbers_equal_those_of_a_plain_loop(accumulation, clip, scaled):
    tracker = GradiometerTracker(project="tests", config={"mine": 7})
    # A power of two changes no bit.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000) if scaled else None
    _, net, _ = train(tracker, accumulation=accumulation, clip=clip, scaler=scaler)
    run = tracker._session.run
    assert run.config == {"mine": 7, "lr": 1e-2}
    out = finished(run)
    losses, expected, plain = reference(accumulation, clip)
    steps = list(range(1, len(losses) + 1))
    assert list(out.points["train/loss"]) == list(norms(out)) == list(out.points["mine"]) == steps
    assert list(out.points["train/loss"].values()) == pytest.approx(losses, rel=1e-5)
    assert list(norms(out).values()) == pytest.approx(expected, rel=1e-5)
    assert min(expected) > 10, "nothing was clipped, so the moment of reading was not tested"
    if clip is not None:
        assert list(out.points["grad/clip_norm"].values()) == pytest.approx(expected, rel=1e-5)
    assert ("scaler/scale" in out.points) == scaled
    assert digest(net) == digest(plain)
    assert digest(train(None, accumulation=accumulation, clip=clip, scaler=None)[1]) == digest(plain)


def test_a_step_that_the_scaler_skips_is_a_step():
    tracker = GradiometerTracker()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, _, optimizer = train(tracker, clip=0.5, scaler=scaler, bad_step=2)
    out = finished(tracker._session.run)
    assert out.points["scaler/skipped"] == {1: 0, 2: 0, 3: 1, 4: 0, 5: 0, 6: 0}
    assert out.points["train/loss"][3] == float("inf")
    assert not optimizer.step_was_skipped


def test_everything_is_given_back_at_the_end():
    tracker = GradiometerTracker()
    accelerator, _, optimizer = train(tracker)
    assert "backward" not in vars(accelerator)
    assert not optimizer.optimizer._optimizer_step_pre_hooks
    assert gm.run.current() is None


def test_the_loss_may_be_left_to_the_user():
    tracker = GradiometerTracker()
    train(tracker, loss=None, forward=False)
    out = finished(tracker._session.run)
    assert "train/loss" not in out.points
    assert list(norms(out)) == [1, 2, 3, 4, 5, 6]


def test_a_run_of_the_users_is_used_and_left_open():
    with gm.init() as run:
        for _ in range(2):
            train(GradiometerTracker())
        run.mark("mine")
        assert run.step == 12
    out = finished(run)
    assert list(out.points["train/loss"]) == list(range(1, 13))
    assert marks(out) == [("mine", 12)]


def test_the_tracker_is_found_by_its_name_and_takes_steps():
    tracker = GradiometerTracker()
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    accelerator.init_trackers("project")
    assert accelerator.get_tracker("gradiometer") is tracker
    run = accelerator.get_tracker("gradiometer", unwrap=True)
    accelerator.log({"a": 1.0}, step=5)
    accelerator.log({"a": 2.0}, step=7)
    accelerator.end_training()
    assert finished(run).points["a"] == {5: 1.0, 7: 2.0}


def test_mistakes_are_told_when_the_tracker_is_made():
    with pytest.raises(TypeError, match="projekt"):
        GradiometerTracker(projekt="typo")
