"""No value of a tensor is asked for on the training thread while a step is captured, and no tensor is kept.

On a GPU each such question stops the training until the device has caught up. It is counted in two ways:

* by method: every way in which Python gets at a value (`item`, `cpu`, `tolist`, `numpy`, `bool`, `float`, ...);
* by operation: `aten::_local_scalar_dense`, to which all of them come down in C++ too, against the same loop without
  the agent, since some optimizers ask for values themselves.

The gradients here are on the CPU. The backend for the CPU looks at their memory as numpy arrays, which waits for
nothing; so `numpy` is counted only in the second half of the cases, which send the gradients through the backend for
other devices, where there must be none of it either.
"""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradiometer as gm
from gradiometer.capture import backends, eager, readback
from tests.support.recorded import recorded

READS = (
    "item",
    "cpu",
    "tolist",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__array__",
    "__len__",
    "__contains__",
)
TIERS = [
    {"statistics": "norm"},
    {"statistics": "full"},
    {"statistics": "auto", "every": 2},
    {"statistics": "norm", "histogram_every": 2},
]
TIER_NAMES = ["norm", "full", "every 2", "histograms"]
STEPS = 6


class CountedScalars(TorchDispatchMode):
    """Counts the operations that bring a value to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return function(*args, **(kwargs or {}))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))


def train(watch, log, *, several=False, on_step=lambda: None):
    """Scaler, clip, a rate that is a tensor; `watch` and `log` may do nothing."""
    model = make()
    parts = (
        [list(model[:2].parameters()), list(model[2:].parameters())]
        if several
        else [list(model.parameters())]
    )
    optimizers = [torch.optim.AdamW(part, lr=torch.tensor(1e-3), fused=True) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch(model, optimizers, scaler)
    for _ in range(STEPS):
        loss = model(torch.randn(16, 8)).square().mean()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        log({"train/loss": loss, "half": loss.half()})
        on_step()
        # Its own questions are the user's.
        with torch.utils._python_dispatch._disable_current_modes():
            scaler.update()


@pytest.fixture
def counted(monkeypatch):
    """Counts reads by method, on the thread that asks for it."""
    training = threading.get_ident()
    reads = []

    def counting(name):
        original = getattr(torch.Tensor, name)

        def method(self, *args, **kwargs):
            if threading.get_ident() == training:
                reads.append(name)
            return original(self, *args, **kwargs)

        return method

    def start(*more):
        for name in (*READS, *more):
            monkeypatch.setattr(torch.Tensor, name, counting(name))
        return reads

    return start


def histograms_of_a_device(gradients):
    return readback.start(torch.stack([eager._bins_of_device(eager.flat(one)) for one in gradients]))


@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("backend", ["cpu", "device"])
@pytest.mark.parametrize("tier", TIERS, ids=TIER_NAMES)
def test_R66_nothing_is_read_from_a_tensor_in_a_step(tier, backend, several, spool, counted, monkeypatch):
    more = ()
    if backend == "device":
        more = ("numpy",)
        monkeypatch.setattr(eager, "read_cpu", eager.read_device)
        monkeypatch.setattr(
            eager, "read_norms", lambda found: eager._read_norms_of_device([*map(eager.flat, found)])
        )
        monkeypatch.setattr(eager, "read_histograms", histograms_of_a_device)
        assert backends.eager is eager
    seen = []
    with gm.init(mode="offline") as run:

        def watch(model, optimizers, scaler):
            run.watch(model, optimizers, scaler, forward=True, **tier)
            seen.append(counted(*more))

        with CountedScalars() as watched:
            train(watch, run.log, several=several, on_step=lambda: seen.append(list(seen[0])))
        monkeypatch.undo()
    assert seen[1:] == [[]] * STEPS
    with CountedScalars() as bare:
        train(lambda *_: None, lambda _: None, several=several)
    assert watched.count == bare.count
    assert run.failures == {}
    out = recorded(run.directory)
    assert list(out.layers["0.weight"]) == list(range(1, STEPS + 1))
    assert np.isfinite(list(out.points["train/loss"].values())).all()
    assert len(out.points["grad/clip_norm"]) == STEPS
    taken = [step for one in out.details if one.kind == "histogram" for step in one.steps]
    assert taken == (list(range(2, STEPS + 1, 2)) if "histogram_every" in tier else [])


def test_the_counters_count(counted):
    reads = counted("numpy")
    with CountedScalars() as scalars:
        value = torch.ones(())
        assert value.item() == float(value) == 1.0
        assert value
        assert value.cpu().numpy().tolist() == 1.0
    assert reads == ["item", "__float__", "__bool__", "cpu", "numpy"]
    assert scalars.count == 3


@pytest.mark.parametrize("watched", [False, True])
def test_R67_logged_tensors_and_their_graphs_are_freed(watched, spool):
    """5,000 calls with tensors that have a graph: when `log` has been carried out, nothing of them is left."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(2, 8)
    alive = []
    with gm.init(mode="offline") as run:
        if watched:
            run.watch(model, optimizer)
        for index in range(5000):
            hidden = model[0](x)
            loss = hidden.sum()
            refs = [weakref.ref(loss), weakref.ref(hidden)]
            # A graph cannot be referred to weakly; what it saved can.
            saved = torch.ones(1)
            other = saved.requires_grad_() * hidden[0, 0]
            refs.append(weakref.ref(saved))
            run.log({"train/loss": loss, "other": other})
            del loss, hidden, saved, other
            # The queue may hold copies of the values for a moment, never the tensors.
            if index % 500 == 0:
                gc.collect()
                alive.append([ref() is not None for ref in refs])
    assert alive == [[False] * 3] * 10
    assert run.dropped.get("the agent's queue was full", 0) < 5000


@pytest.mark.parametrize("tier", TIERS, ids=TIER_NAMES)
def test_R67_gradients_are_freed_when_their_step_is_over(tier, spool):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer, **tier)
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            refs = [weakref.ref(parameter.grad) for parameter in model.parameters()]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert [ref() for ref in refs] == [None] * len(refs)
