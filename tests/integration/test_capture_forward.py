"""A NaN born in the forward pass is attributed to the module that made it, and the probe changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradiometer as gm
from gradiometer.capture import finite, native
from gradiometer.guard import Guard
from tests.support.recorded import recorded


class Poison(nn.Module):
    """Divides by zero when told to."""

    def __init__(self):
        super().__init__()
        self.active = False

    def forward(self, x):
        return x / 0.0 if self.active else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Sequential(Poison(), nn.Linear(4, 4), nn.Identity())
        self.last = nn.Linear(4, 1)
        self.checkpointed = False

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpointed else self.middle(x)
        return self.last(x)


def train(model, run, *, steps=3, bad_step=2, micro_batches=1, forward=None, between=lambda model: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run.watch(model, optimizer, forward=forward)
    inner = getattr(model, "_orig_mod", model)
    for step in range(1, steps + 1):
        for index in range(micro_batches):
            inner.middle[0].active = step == bad_step and index == micro_batches - 1
            model(torch.ones(3, 4)).sum().backward()
        inner.middle[0].active = False
        between(model)
        optimizer.step()
        optimizer.zero_grad()


def outcome(model=None, **options):
    torch.manual_seed(0)
    if model is None:
        model = Net()
    with gm.init(mode="offline") as run:
        train(model, run, **options)
    assert run.failures == {}
    return recorded(run.directory)


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    """Outputs are looked at by the native kernel, or as on a device and without the kernel."""
    if request.param == "torch":
        monkeypatch.setattr(finite, "tester", lambda: finite.unknown)
    elif native.load() is None:
        pytest.skip(native.why_not())
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_first_bad_module_in_forward_order_is_named_before_the_numbers_of_its_step(micro_batches, spool):
    out = outcome(micro_batches=micro_batches)
    # The weights are NaN after step 2, so step 3 is bad from the first module on.
    first, second = out.of_kind("nonfinite_activation")
    assert (first.step, first.attributes) == (2, {"modules": ["middle.0", "middle.1", "last"]})
    assert (second.step, second.attributes["modules"][0]) == (3, "first")
    order = [entry for entry in out.stream if entry[1] == 2]
    assert order.index(("nonfinite_activation", 2)) < order.index(("layers", 2)) < order.index(("scalars", 2))


def test_recomputation_in_the_backward_pass_does_not_change_the_order(spool):
    model = Net()
    model.checkpointed = True
    event = outcome(model=model).of_kind("nonfinite_activation")[0]
    assert event.attributes["modules"] == ["middle.0", "middle.1", "last"]


@pytest.mark.usefixtures("way")
def test_a_healthy_run_has_no_event(spool):
    assert outcome(bad_step=None).of_kind("nonfinite_activation") == []


def test_evaluation_is_not_looked_at(spool):
    def evaluate(model):
        model.middle[0].active = True
        with torch.no_grad():
            model(torch.ones(3, 4))
        model.eval()
        model(torch.ones(3, 4))
        model.train()
        model.middle[0].active = False

    assert outcome(bad_step=None, between=evaluate).of_kind("nonfinite_activation") == []


def test_outputs_in_tuples_and_dicts_are_looked_into(spool):
    class Tree(nn.Module):
        def forward(self, x):
            return {"ids": torch.ones(2, dtype=torch.long), "hidden": (None, [x * float("inf")])}

    model = nn.ModuleDict({"tree": Tree(), "head": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        model["head"](torch.ones(1, 2)).sum().backward()
        model["tree"](torch.ones(2))
        optimizer.step()
    assert recorded(run.directory).of_kind("nonfinite_activation")[0].attributes == {"modules": ["tree"]}


def test_many_micro_batches_take_bounded_memory_and_keep_the_order(way, spool, monkeypatch):
    from gradiometer.capture import forward

    monkeypatch.setattr(forward, "_FOLD", 3)
    event = outcome(micro_batches=9).of_kind("nonfinite_activation")[0]
    assert event.attributes["modules"] == ["middle.0", "middle.1", "last"]
    monkeypatch.setattr(forward, "MAX_BLOCKS", 2)
    events = outcome(micro_batches=9, steps=2).of_kind("nonfinite_activation")
    # Finite outputs that the kernel has looked at take none of the memory.
    assert len(events) == (1 if way == "kernel" else 0)


def test_outputs_that_are_all_bad_take_bounded_memory(way, spool, monkeypatch):
    from gradiometer.capture import forward

    monkeypatch.setattr(forward, "_FOLD", 3)
    monkeypatch.setattr(forward, "MAX_BLOCKS", 1)
    model = Net()
    with torch.no_grad():
        model.first.weight.fill_(float("nan"))
    probe = forward.ForwardProbe(model, Guard())
    for _ in range(5):
        model(torch.ones(3, 4))
    report = probe.take()
    probe.close()
    assert len(report._order) == 3
    assert report.nonfinite_modules() == ["first", "middle.0", "middle.1"]


def test_a_finite_output_costs_no_operation_with_the_kernel(way):
    from torch.utils._python_dispatch import TorchDispatchMode

    from gradiometer.capture import forward

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def operations():
        seen.clear()
        with Operations():
            assert model(images).stride(1) == 1
        return list(seen)

    seen = []
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    bare = operations()
    probe = forward.ForwardProbe(model, Guard())
    probed = operations()
    if way == "kernel":
        assert probed == bare
    else:
        assert probed.count("aten.aminmax.default") == 1, "ReLU cannot be the first that is not finite"
    assert probe.has_seen_any()
    report = probe.take()
    assert report is None if way == "kernel" else report.nonfinite_modules() == []
    assert not probe.has_seen_any()
    probe.close()


@pytest.mark.parametrize("forward", [False, None, True])
def test_a_compiled_model_is_left_alone_with_a_reason(forward, spool):
    model = torch.compile(Net(), backend="eager")
    out = outcome(model=model, forward=forward, bad_step=None)
    assert "nonfinite_activation" in out.unavailable()
    assert not any(module._forward_hooks for module in model.modules())
    assert "first.weight" in out.layers, "wrapper prefixes are stripped"


def test_a_model_compiled_after_watch_gets_no_extra_graph(spool):
    from torch._dynamo.testing import CompileCounter

    def graphs(watched):
        torch._dynamo.reset()
        counter = CompileCounter()
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gm.init(mode="offline" if watched else "disabled") as run:
            run.watch(model, optimizer)
            compiled = torch.compile(model, backend=counter)
            for _ in range(3):
                compiled(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            assert run.step == (3 if watched else 0)
        return counter.frame_count

    assert graphs(True) == graphs(False) == 1


def test_a_model_with_many_leaves_is_not_probed_unless_asked(spool):
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(513)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
    assert "513 leaf modules" in recorded(run.directory).unavailable()["nonfinite_activation"]
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer, forward=True)
    assert "nonfinite_activation" not in recorded(run.directory).unavailable()


def test_the_probe_keeps_no_output_and_no_graph(spool):
    import gc
    import weakref

    with gm.init(mode="offline") as run:
        model = nn.Sequential(nn.Linear(4, 4))
        run.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
        output = model(torch.ones(2, 4))
        assert output.grad_fn.name() == "AddmmBackward0"
        gone = weakref.ref(output)
        del output
        gc.collect()
        assert gone() is None
