"""Every way of writing a training loop reports the pre-clip, unscaled, accumulated gradient once per optimizer step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

import gradiometer as gm
from gradiometer.capture import statistics
from gradiometer.capture.statistics import COUNT, NUM_NONFINITE, SUM_SQUARES
from tests.support.recorded import recorded

SCALE = 1024.0
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 1))


def batch(index=0):
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(32, 8, generator=generator), 5 * torch.randn(32, 1, generator=generator)


def loss_of(model, index=0):
    x, y = batch(index)
    return nn.functional.mse_loss(model(x), y)


def reference(model, indices=(0,)):
    """Rows by parameter of the true gradient: the mean over the micro-batches `indices`."""
    copied = make()
    copied.load_state_dict(model.state_dict())
    for index in indices:
        (loss_of(copied, index) / len(indices)).backward()
    return {
        name: statistics.exact(parameter.grad.to(torch.float64).numpy())
        for name, parameter in copied.named_parameters()
    }


def assert_layers(out, step, expected):
    assert set(out.layers) == set(expected)
    for name, row in expected.items():
        size = math.sqrt(row[SUM_SQUARES] * row[COUNT])
        assert_allclose(out.layers[name][step], row, rtol=1e-5, atol=1e-6 * size, err_msg=name)


def recorded_run(loop, *arguments, **options):
    """Run `loop(run, ...)` in an offline run and read back what it recorded."""
    with gm.init(mode="offline") as run:
        loop(run, *arguments, **options)
        directory = run.directory
    assert run.failures == {}
    return recorded(directory)


def test_a_plain_loop(spool):
    expected = {}

    def loop(run):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        assert run.step == 0
        for step in (1, 2, 3):
            expected[step] = reference(model)
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert run.step == step
            run.log({"train/loss": loss})

    out = recorded_run(loop)
    for step in (1, 2, 3):
        assert_layers(out, step, expected[step])
    assert out.points["train/lr"] == {1: 1e-3, 2: 1e-3, 3: 1e-3}
    assert list(out.points["train/loss"]) == [1, 2, 3]
    assert list(out.points["time/step_s"]) == [2, 3]
    assert all(0 < value < 1 for value in out.points["agent/step_s"].values())
    assert all(value > 1e7 for value in out.points["memory/process_rss_bytes"].values())
    assert "scaler/scale" not in out.points
    assert list(out.declared) == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
        "3.weight",
        "3.bias",
    ]
    assert out.declared["0.weight"].shape == (16, 8)
    assert set(out.unavailable()) == {
        "memory/allocated_bytes",
        "memory/reserved_bytes",
        "memory/peak_allocated_bytes",
        "memory/alloc_retries",
        "memory/fragmentation_fraction",
        "memory/activations_bytes",
        "memory/device_total_bytes",
    }


def test_layers_come_before_the_scalars_of_their_step(spool):
    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        for _ in range(20):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    stream = recorded_run(loop).stream
    for step in range(1, 21):
        assert stream.index(("layers", step)) < stream.index(("scalars", step))


@FUSED
@pytest.mark.parametrize("clip", ["no clip", "clip after unscale", "clip before unscale"])
def test_accumulation_under_a_scaler(fused, clip, spool):
    expected = {}

    def loop(run):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        run.watch(model, optimizer, scaler, statistics="full")
        for step in (1, 2):
            expected[step] = reference(model, (0, 1, 2))
            for index in (0, 1, 2):
                scaler.scale(loss_of(model, index) / 3).backward()
            if clip == "clip after unscale":
                scaler.unscale_(optimizer)
            if clip != "no clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    out = recorded_run(loop)
    for step in (1, 2):
        assert_layers(out, step, expected[step])
        norm = math.sqrt(sum(row[SUM_SQUARES] for row in expected[step].values()))
        if clip == "clip after unscale":
            assert out.points["grad/clip_norm"][step] == pytest.approx(norm, rel=1e-5)
        if clip == "clip before unscale":
            # What the user's own call returned, under a name that says so.
            assert out.points["grad/clip_norm_scaled"][step] == pytest.approx(norm * SCALE, rel=1e-5)
            assert "still multiplied by the loss scale" in out.unavailable()["grad/clip_norm"]
            assert "grad/clip_norm" not in out.points
    assert out.points["scaler/scale"] == {1: SCALE, 2: SCALE}
    assert out.points["scaler/skipped"] == {1: 0.0, 2: 0.0}


@FUSED
@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_skipped_step_is_a_step_and_names_the_parameter(fused, unscale_first, spool):
    def loop(run):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        run.watch(model, optimizer, scaler, statistics="full")
        for step in (1, 2, 3):
            scaler.scale(loss_of(model)).backward()
            if step == 2:
                model[2].weight.grad[0, 0] = math.inf
            if unscale_first:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert run.step == step

    out = recorded_run(loop)
    assert out.points["scaler/skipped"] == {1: 0.0, 2: 1.0, 3: 0.0}
    assert out.points["scaler/scale"] == {1: SCALE, 2: SCALE, 3: SCALE / 2}
    assert {name for name, rows in out.layers.items() if rows[2][NUM_NONFINITE]} == {"2.weight"}
    assert out.layers["2.weight"][2][NUM_NONFINITE] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_is_seen_before_clipping_spreads_it(bad, spool):
    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        loss_of(model).backward()
        model[2].bias.grad[1] = bad
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert sum(int((~parameter.grad.isfinite()).sum()) for parameter in model.parameters()) >= 1
        optimizer.step()

    out = recorded_run(loop)
    assert {name: rows[1][NUM_NONFINITE] for name, rows in out.layers.items() if rows[1][NUM_NONFINITE]} == {
        "2.bias": 1
    }
    assert out.layers["0.weight"][1][SUM_SQUARES] > 0
    assert not math.isfinite(out.points["grad/clip_norm"][1])


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_closure_is_read_after_it_ran_not_before(by_keyword, spool):
    expected = {}

    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        run.watch(model, optimizer, statistics="full")

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for step in (1, 2):
            expected[step] = reference(model)
            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            assert loss.item() > 0

    out = recorded_run(loop)
    for step in (1, 2):
        assert_layers(out, step, expected[step])


def test_lbfgs_reports_the_gradient_at_the_start_of_each_step(spool):
    expected = {}

    def train(run):
        model = make()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
        if run is not None:
            run.watch(model, optimizer, statistics="full")

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for step in (1, 2):
            expected[step] = reference(model)
            optimizer.step(closure)
        return [parameter.detach().clone() for parameter in model.parameters()]

    weights = []
    out = recorded_run(lambda run: weights.extend(train(run)))
    assert all(torch.equal(a, b) for a, b in zip(weights, train(None), strict=True))
    for step in (1, 2):
        assert_layers(out, step, expected[step])


def test_clipping_by_groups_reads_every_group_before_its_clip(spool):
    expected = {}

    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(
            [
                {"params": model[0].parameters(), "lr": 1e-2},
                {"params": [*model[2].parameters(), *model[3].parameters()]},
            ],
            lr=1e-3,
        )
        run.watch(model, optimizer, statistics="full")
        expected.update(reference(model))
        loss_of(model).backward()
        for part in (model[0], model[2], model[3]):
            nn.utils.clip_grad_norm_(part.parameters(), 0.01)
        optimizer.step()

    out = recorded_run(loop)
    assert_layers(out, 1, expected)
    assert "grad/clip_norm" not in out.points
    assert out.points["train/lr"] == {1: 1e-2}
    assert out.points["train/lr/group1"] == {1: 1e-3}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loop_that_leaves_out_a_step_after_clipping_reports_the_next_gradient(set_to_none, spool):
    expected = {}

    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        loss_of(model, 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.zero_grad(set_to_none=set_to_none)
        expected.update(reference(model, (1,)))
        loss_of(model, 1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    out = recorded_run(loop)
    assert list(out.points["train/lr"]) == [1]
    assert_layers(out, 1, expected)


def test_clipping_another_model_does_not_start_a_capture(spool):
    expected = {}

    def loop(run):
        model, other = make(), make(seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        loss_of(other).backward()
        (loss_of(model, 0) / 2).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        expected.update(reference(model, (0, 1)))
        (loss_of(model, 1) / 2).backward()
        optimizer.step()

    assert_layers(recorded_run(loop), 1, expected)


def test_two_optimizers_the_first_is_the_clock(spool):
    def loop(run):
        first, second = make(), make(seed=1)
        first_optimizer = torch.optim.SGD(first.parameters(), lr=1e-3)
        second_optimizer = torch.optim.SGD(second.parameters(), lr=1e-2)
        run.watch(first, first_optimizer)
        run.watch(second, second_optimizer, name="critic")
        for step in (1, 2):
            loss_of(first).backward()
            first_optimizer.step()
            for _ in range(3):
                loss_of(second).backward()
                second_optimizer.step()
            assert run.step == step

    out = recorded_run(loop)
    assert list(out.points["train/lr"]) == [1, 2]
    assert out.points["train/lr/critic"] == {1: 1e-2, 2: 1e-2}
    assert list(out.layers["0.weight"]) == [1, 2]
    assert list(out.layers["critic.0.weight"]) == [1, 2]
    assert len([entry for entry in out.stream if entry == ("layers", 1)]) == 2


def test_a_parameter_without_a_gradient_has_count_zero(spool):
    def loop(run):
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step()

    out = recorded_run(loop)
    assert out.layers["used.weight"][1][COUNT] == 4
    assert out.layers["unused.weight"][1] == (0,) * 7


def test_half_precision_gradients_are_summed_in_float32(spool):
    def loop(run):
        model = nn.Linear(300, 300, bias=False).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        model.weight.grad = torch.full((300, 300), 333.0, dtype=torch.half)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()

    out = recorded_run(loop)
    assert out.layers["weight"][1][SUM_SQUARES] == pytest.approx(90_000 * 333.0**2, rel=1e-5)


def test_sparse_gradients(spool):
    def loop(run):
        model = nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        model(torch.tensor([1, 1, 3])).sum().backward()
        optimizer.step()

    # torch warns about its own sparse construction; it is not ours to silence in the product.
    with torch.sparse.check_sparse_tensor_invariants(True):
        row = recorded_run(loop).layers["weight"][1]
    assert row == (40, 12, 20, 0, 2, 32, 0)


def test_parameters_added_to_the_optimizer_later_are_followed(spool):
    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model[3].parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        for step in (1, 2):
            loss_of(model).backward()
            optimizer.step()
            if step == 1:
                optimizer.add_param_group({"params": list(model[0].parameters())})

    out = recorded_run(loop)
    assert list(out.layers["3.weight"]) == [1, 2]
    assert list(out.layers["0.weight"]) == [2]


def test_wrapped_optimizers_are_unwrapped(spool):
    class Wrapper:
        def __init__(self, inner):
            self.optimizer = inner

    def loop(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, Wrapper(Wrapper(optimizer)))
        loss_of(model).backward()
        optimizer.step()

    assert list(recorded_run(loop).points["train/lr"]) == [1]


def test_a_resumed_run_counts_on(spool):
    with gm.init(mode="offline", run_id="resumed", resume="allow", start_step=100) as run:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        assert run.step == 100
        loss_of(model).backward()
        optimizer.step()
        assert run.step == 101
    assert list(recorded(run.directory).points["train/lr"]) == [101]


def test_what_cannot_be_watched_is_said_once_and_training_goes_on(spool, caplog):
    model = make()
    with gm.init(mode="offline") as run:
        run.watch(model, object())
        stranger = torch.optim.SGD(make(seed=3).parameters(), lr=1.0)
        run.watch(model, stranger)
        stranger.step()
        stranger.step()
        run.watch(model, stranger)
    assert run.step == 2
    assert run.failures == {}
    out = recorded(run.directory)
    assert "got Sequential and object" in out.unavailable()["grad/norm"]
    assert "none of the model's parameters is in the optimizer" in out.unavailable()["grad/layers"]
    assert "watch() was called twice for one optimizer" in caplog.text
    assert len([text for text in caplog.messages if "none of the model's parameters" in text]) == 1
    assert out.points["train/lr"] == {1: 1.0, 2: 1.0}
    assert out.layers == {}


def test_an_error_inside_the_capture_costs_the_capture_only(spool, monkeypatch, caplog):
    from gradiometer.capture import backends

    def broken(_gradients):
        raise RuntimeError("out of pinned memory")

    with gm.init(mode="offline") as run:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        run.watch(model, optimizer, statistics="full")
        monkeypatch.setattr(backends.eager, "read_cpu", broken)
        weights = model[0].weight.detach().clone()
        for _ in range(3):
            loss_of(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.log({"train/loss": 1.0})
        assert not torch.equal(weights, model[0].weight)
    out = recorded(run.directory)
    assert "out of pinned memory" in out.unavailable()["gradient capture"]
    assert len([text for text in caplog.messages if "gradient capture failed" in text]) == 1
    assert list(out.points["train/loss"]) == [1, 2, 3], "steps are counted without their gradients"


def test_an_error_of_the_training_reaches_the_user_unchanged(spool):
    with gm.init(mode="offline") as run:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu")
        run.watch(model, optimizer, scaler, statistics="full")
        with pytest.raises(AssertionError, match="outputs"):
            scaler.step(optimizer)
        scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"already been called"):
            scaler.step(optimizer)
        model[0].weight.grad[0, 0] = math.nan
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_no_value_is_read_from_a_tensor_on_the_training_thread(spool, monkeypatch):
    """On a GPU each of these would be a stop; on the CPU they can at least be counted."""
    import threading

    training = threading.get_ident()
    reads = []

    def counting(name):
        original = getattr(torch.Tensor, name)

        def method(self, *args, **kwargs):
            if threading.get_ident() == training:
                reads.append(name)
            return original(self, *args, **kwargs)

        return method

    def loop(run):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        run.watch(model, optimizer, scaler, statistics="full")
        for name in ("item", "cpu", "tolist", "__bool__", "__float__", "__int__", "__index__"):
            monkeypatch.setattr(torch.Tensor, name, counting(name))
        for _ in range(3):
            loss = loss_of(model)
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            run.log({"train/loss": loss, "half": loss.half()})
            assert not reads
        monkeypatch.undo()

    out = recorded_run(loop)
    assert len(out.points["train/loss"]) == 3
    assert np.isfinite(list(out.points["half"].values())).all()
