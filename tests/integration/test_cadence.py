"""Runs whose full statistics are read now and then: what is in the spool, and what the agent charges itself."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer import wire
from gradiometer.capture import native, statistics, tiers
from gradiometer.spool_reader import SpoolReader
from tests.support.recorded import recorded

pytestmark = pytest.mark.usefixtures("spool")


@pytest.fixture
def no_native(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "why_not", lambda: "taken away")


class Still(torch.optim.Optimizer):
    """Leaves the weights alone, so that one broken step does not break the next."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure=None):
        return None


class SlowMetrics(dict):
    """Takes its time, on the account of `log`."""

    def items(self):
        time.sleep(0.02)
        return super().items()


def train(steps=12, broken=(), before_step=None, **options):
    """Train a little model offline; the loss of `broken` steps is NaN. Returns (recorded run, its folder)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = Still(model.parameters())
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer, checks=False, **options)
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).sum() * (float("nan") if step in broken else 1.0)
            loss.backward()
            if before_step is not None:
                before_step(run, model)
            optimizer.step()
        directory = run.directory
    assert run.failures == {}
    return recorded(directory), directory


def widths(out):
    """Step -> number of statistics in each layer's row."""
    (rows,) = {
        tuple(sorted((step, len(row)) for step, row in steps.items())) for steps in out.layers.values()
    }
    return dict(rows)


def full_steps(out):
    return [step for step, width in widths(out).items() if width == 7]


def test_the_first_of_every_so_many_steps_is_read_in_full(no_native):
    out, directory = train(12, every=5)
    assert full_steps(out) == [1, 6, 11]
    assert set(widths(out)) == set(range(1, 13)), "norms in every step"
    schemas = [record for record in decoded(directory) if isinstance(record, wire.LayerSchema)]
    assert [schema.statistics for schema in schemas] == [wire.STATISTICS, wire.NORM_STATISTICS]
    assert schemas[0].layers == schemas[1].layers


def decoded(directory):
    reader = SpoolReader(directory)
    try:
        return [wire.decode_record(data) for _, data in reader.records()]
    finally:
        reader.close()


def test_without_a_kernel_auto_reads_norms_and_says_so(no_native):
    out, _ = train(3)
    assert full_steps(out) == [1]
    (event,) = out.of_kind("environment")
    told = event.attributes["facts"]["gradient statistics"]
    assert "every 50 steps" in told
    assert "taken away" in told
    assert "one of 50 steps" in out.unavailable()["grad/zero_fraction"]


@pytest.mark.parametrize("options", [{"statistics": "full"}, {"every": 1}], ids=str)
def test_whoever_wants_everything_gets_it(no_native, options):
    out, _ = train(3, **options)
    assert full_steps(out) == [1, 2, 3]
    assert "grad/zero_fraction" not in out.unavailable()


def test_norms_alone_stay_norms_whatever_happens():
    out, _ = train(4, broken={2}, statistics="norm")
    assert full_steps(out) == []
    assert out.layers["2.weight"][2][2] == 8, "all elements are NaN"
    assert 'statistics="norm"' in out.unavailable()["grad/zero_fraction"]


def test_a_step_that_is_not_finite_is_read_in_full_at_once(no_native):
    out, _ = train(12, broken={4, 8}, every=10)
    assert full_steps(out) == [1, 4, 8, 11]
    row = out.layers["2.weight"][4]
    assert row[statistics.NUM_NONFINITE] == row[statistics.COUNT] == 8
    assert np.isnan(row[statistics.MIN])


def test_a_sparse_gradient_that_is_not_finite_is_noticed_like_any_other():
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = Still(model.parameters())
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer, checks=False, every=10)
        for step in range(1, 7):
            optimizer.zero_grad()
            (model(torch.tensor([1, 2])).sum() * (float("nan") if step == 4 else 1.0)).backward()
            optimizer.step()
        directory = run.directory
    assert full_steps(recorded(directory)) == [1, 4]


def test_R65_every_step_of_a_wide_model_is_read_and_the_agent_tells_its_own_time():
    """What it costs is measured by `benchmarks/agent_overhead.py --models layers200`, and written down beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(200) for layer in (nn.Linear(256, 256), nn.ReLU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 256)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        directory = run.directory
    out = recorded(directory)
    assert len(out.layers) == 400
    assert all(set(steps) == set(range(1, 7)) for steps in out.layers.values())
    fractions = out.points["agent/overhead_fraction"]
    assert set(fractions) == set(range(2, 7))
    assert all(0 < fraction < 1 for fraction in fractions.values())


def test_a_run_that_stays_broken_goes_back_to_norms(no_native):
    last = 5 + tiers.MAX_BROKEN
    out, _ = train(last + 6, broken=range(6, 100), every=100)
    assert full_steps(out) == [1, *range(6, last + 1)]


def test_norms_are_the_same_in_both_kinds_of_step(no_native):
    norms, _ = train(6, statistics="norm")
    full, _ = train(6, statistics="full")
    for name, steps in full.layers.items():
        for step, row in steps.items():
            assert norms.layers[name][step] == pytest.approx([row[i] for i in statistics.NORMS], rel=1e-6)


def test_a_clip_that_reads_first_and_the_step_that_follows_are_one_reading(no_native):
    out, _ = train(7, before_step=lambda _, model: nn.utils.clip_grad_norm_(model.parameters(), 1.0), every=3)
    assert full_steps(out) == [1, 4, 7]


def test_two_optimizers_keep_step_with_one_clock(no_native):
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    with gm.init(mode="offline") as run:
        run.watch(generator, optimizers[0], every=4)
        run.watch(critic, optimizers[1], name="critic", every=4)
        for step in range(1, 10):
            for model, optimizer in zip((generator, critic), optimizers, strict=True):
                if model is critic and step % 2:
                    continue
                optimizer.zero_grad()
                model(torch.randn(2, 3)).sum().backward()
                optimizer.step()
        directory = run.directory
    out = recorded(directory)
    full = {
        name: [step for step, row in steps.items() if len(row) == 7] for name, steps in out.layers.items()
    }
    assert full["weight"] == [1, 5, 9]
    assert full["critic.weight"] == [2, 6], "its first steps in each stretch of four"
    facts = {name for event in out.of_kind("environment") for name in event.attributes["facts"]}
    assert facts == {"gradient statistics", "gradient statistics of critic"}
    frames = [record for record in decoded(directory) if isinstance(record, wire.Frame)]
    layer_ids = {record.schema_id for record in decoded(directory) if isinstance(record, wire.LayerSchema)}
    steps = [step for frame in frames if frame.schema_id in layer_ids for step in frame.steps]
    assert steps == sorted(steps)


def test_the_agent_charges_itself_for_logs_hooks_and_clips():
    out, _ = train(6, before_step=lambda run, _: run.log(SlowMetrics(slow=1.0)))
    fractions = out.points["agent/overhead_fraction"]
    assert set(fractions) == set(range(2, 7)), "the first step has no beginning"
    for step, fraction in fractions.items():
        spent_s, step_s = out.points["agent/step_s"][step], out.points["time/step_s"][step]
        assert fraction == pytest.approx(spent_s / step_s)
        assert spent_s >= 0.02
        assert 0 < fraction <= 1


def test_the_agent_is_not_charged_for_the_scalers_own_work(monkeypatch):
    scaler = torch.amp.GradScaler("cpu")
    original = scaler.unscale_

    def slow(optimizer):
        time.sleep(0.05)
        original(optimizer)

    monkeypatch.setattr(scaler, "unscale_", slow)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=False)
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer, scaler)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        directory = run.directory
    out = recorded(directory)
    assert out.points["time/step_s"][4] >= 0.05
    assert all(value < 0.04 for step, value in out.points["agent/step_s"].items() if step > 1)
