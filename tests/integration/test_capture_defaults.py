"""The user's default device and dtype are for the user's tensors: what the agent makes of its own does not follow them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture import readback
from tests.support.recorded import recorded


@pytest.fixture
def default_device(request):
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def train(run, dtype=torch.float32):
    """Two steps, clipped, with every kind of reading: probe, scaler, clip norm, logged tensors, sparse and half."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    model = nn.ModuleDict(
        {
            "wide": nn.Linear(8, 3000, device=cpu, dtype=dtype),
            "lookup": nn.Embedding(4, 8, sparse=True, device=cpu, dtype=dtype),
            "narrow": nn.Linear(8, 1, device=cpu, dtype=torch.bfloat16),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run.watch(model, optimizer, scaler, forward=True)
    for _ in range(2):
        optimizer.zero_grad()
        embedded = model["lookup"](torch.tensor([0, 2], device=cpu))
        loss = model["wide"](embedded).square().mean() + model["narrow"](embedded.bfloat16()).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([*model["wide"].parameters(), *model["narrow"].parameters()], 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.log({"train/loss": loss, "rate": torch.tensor(0.25, dtype=torch.float16, device=cpu)})


def recorded_training(path, dtype=torch.float32):
    with gm.init(mode="offline", spool=path) as run:
        train(run, dtype)
        directory = run.directory
    assert run.failures == {}
    assert run.dropped == {}
    return recorded(directory)


def assert_same(found, expected):
    assert found.layers.keys() == expected.layers.keys()
    for name, steps in expected.layers.items():
        assert list(steps) == [1, 2]
        for step, row in steps.items():
            assert found.layers[name][step] == pytest.approx(row, rel=1e-6, abs=1e-9, nan_ok=True)
    measured = {
        name for name in expected.points if not name.startswith(("time/", "agent/", "memory/", "process/"))
    }
    assert {"train/loss", "rate", "scaler/scale", "train/lr"} <= measured
    for name in measured:
        assert found.points[name] == pytest.approx(expected.points[name]), name


@pytest.mark.parametrize("default_device", ["meta"], indirect=True)
def test_captures_under_another_default_device(tmp_path, default_device):
    found = recorded_training(tmp_path / "meta")
    torch.set_default_device(None)
    assert_same(found, recorded_training(tmp_path / "plain"))


@pytest.mark.parametrize("default_dtype", [torch.float64, torch.float16], indirect=True)
def test_captures_under_another_default_dtype(tmp_path, default_dtype):
    found = recorded_training(tmp_path / "other")
    torch.set_default_dtype(torch.float32)
    assert_same(found, recorded_training(tmp_path / "plain"))


@pytest.mark.parametrize("default_device", ["meta"], indirect=True)
def test_the_pinned_memory_of_a_readback_is_in_host_memory(monkeypatch, default_device):
    made = []
    real_empty = torch.empty
    # torch looks up once which functions follow the default device: before this one is replaced.
    assert real_empty(1).is_meta

    def empty(*shape, pin_memory=False, **options):
        # This machine may have nothing to pin memory for; all else is as it was asked for.
        made.append(pin_memory)
        return real_empty(*shape, **options)

    class Event:
        def __init__(self, **_options):
            pass

        def record(self, _stream):
            pass

        def synchronize(self):
            pass

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    values = torch.tensor([1.0, 2.5], device="cpu")
    assert readback.CudaReadback(values).values().tolist() == [1.0, 2.5]
    assert made == [True]
