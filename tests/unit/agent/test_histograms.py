"""Histograms in the agent: who is served in which step, how often, and that the counts are those of the gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer import wire
from gradiometer.capture import eager, native
from gradiometer.capture import histograms as captured
from gradiometer.capture.readback import KnownReadback
from gradiometer.commands import Outbox
from gradiometer.drops import Drops
from gradiometer.histograms import (
    ENDED,
    MAX_ON_ALERT,
    NOTHING_WATCHED,
    QUIET_STEPS,
    TOO_OFTEN,
    HistogramDesk,
    Wish,
)
from tests.support.eventually import eventually
from tests.support.recorded import recorded


class Steps:
    """A watch's counter."""

    step = 1

    def __call__(self):
        return self.step


def desk_and_wishes(**kwargs):
    steps, drops = Steps(), Drops()
    desk = HistogramDesk(drops)
    return desk, desk.join(steps, **{"every": None, "at_once": True, **kwargs}), steps, drops


def served(wishes, steps, over):
    found = []
    for steps.step in over:
        wish = wishes.granted()
        if wish is not None:
            found.append((steps.step, wish.reason))
    return found


def test_a_wish_is_served_once_by_every_watch_and_the_same_for_all_readings_of_a_step():
    desk, first, steps, _ = desk_and_wishes()
    second = desk.join(steps, every=None, at_once=True)
    desk.want(Wish(reason="look"))
    assert first.granted() is first.granted() is not None
    desk.want(Wish(reason="too late for this step"))
    assert first.granted().reason == "look"
    assert served(first, steps, range(2, 5)) == [(2, "too late for this step")]
    # Two wishes that wait for the same step are one histogram.
    assert served(second, steps, range(5, 8)) == [(5, "look")]
    desk.leave(second)
    desk.want(Wish(reason="again"))
    assert served(second, steps, range(8, 10)) == []


def test_a_wish_for_a_step_waits_for_it_and_others_pass_it():
    desk, wishes, steps, _ = desk_and_wishes()
    desk.command(wire.Command(id="a", kind="histogram", reason="at ten", step=10))
    desk.command(wire.Command(id="b", kind="histogram"))
    assert served(wishes, steps, range(1, 15)) == [(1, "the server asked for it"), (10, "at ten")]
    desk.command(wire.Command(id="c", kind="histogram", reason="in the past", step=3))
    assert served(wishes, steps, range(15, 17)) == [(15, "in the past")]


def test_the_cadence_names_steps_that_are_the_same_on_all_ranks():
    _, wishes, steps, _ = desk_and_wishes(every=4)
    assert [step for step, _ in served(wishes, steps, range(3, 13))] == [4, 8, 12]


def test_trouble_that_is_seen_at_once_takes_the_step_itself_and_the_next():
    desk, wishes, steps, _ = desk_and_wishes()
    found = {}
    for steps.step in range(1, 60):
        wish = wishes.granted()
        if steps.step >= 10:
            wish = wishes.nonfinite()
        if wish is not None:
            found[steps.step] = wish
        if steps.step == 13:
            desk.trouble(10, "the ring says so too")
    assert list(found) == [10, 11]
    assert (found[10].about, found[11].about) == (10, 10)
    assert "a step after it" in found[11].reason
    # Trouble that was gone for a while is another incident.
    steps.step = 60 + QUIET_STEPS
    assert wishes.granted() is None
    assert wishes.nonfinite().about == steps.step


def test_trouble_that_only_the_agents_thread_sees_takes_the_next_reading():
    desk, wishes, steps, _ = desk_and_wishes(at_once=False)
    desk.trouble(10, "train/loss is not finite")
    assert served(wishes, steps, [13, 14]) == [(13, "train/loss is not finite (a step after it)")]


def test_histograms_on_alert_are_bounded_and_counted_and_those_asked_for_are_not():
    desk, wishes, steps, drops = desk_and_wishes()
    for number in range(MAX_ON_ALERT + 3):
        steps.step = number + 1
        desk.command(wire.Command(id=str(number), kind="histogram", reason="alert", on_alert=True))
        assert (wishes.granted() is not None) == (number < MAX_ON_ALERT)
    assert drops.totals == {TOO_OFTEN: 3}
    desk.want(Wish(reason="mine"))
    assert served(wishes, steps, [500]) == [(500, "mine")]


def test_wishes_that_nobody_can_serve_are_counted_and_those_that_wait_are_bounded():
    drops = Drops()
    HistogramDesk(drops).want(Wish(reason="nobody", about=3))
    HistogramDesk(drops).command(wire.Command(id="a", kind="histogram", on_alert=True))
    assert drops.totals == {NOTHING_WATCHED: 1}
    desk, wishes, steps, _ = desk_and_wishes()
    for number in range(1000):
        desk.want(Wish(reason="far", from_step=10**6 + number))
        wishes.granted()
        steps.step += 1
    assert len(wishes._waiting) <= 17


def test_what_was_asked_for_and_never_came_is_told():
    told, steps, drops = [], Steps(), Drops()
    desk = HistogramDesk(drops, lambda metric, reason: told.append((metric, reason)))
    wishes = desk.join(steps, every=None, at_once=True)
    desk.command(wire.Command(id="a", kind="histogram", reason="asked for over REST", step=40))
    desk.command(wire.Command(id="b", kind="histogram", reason="alert x", step=50, on_alert=True))
    assert wishes.granted() is None
    desk.want(Wish(reason="mine"))
    desk.leave(wishes)
    desk.leave(wishes)
    assert [metric for metric, _ in told] == ["histogram"] * 2
    assert "asked for over REST" in told[0][1]
    assert "in step 40" in told[0][1]
    assert "in the next step" in told[1][1]
    desk.command(wire.Command(id="c", kind="histogram", step=60))
    assert drops.totals == {ENDED: 1}


@pytest.mark.usefixtures("offline")
def test_a_run_that_ends_before_the_step_that_was_asked_for_says_so():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gm.init() as run:
        run.watch(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        outbox = Outbox(run.directory, rank=0)
        outbox.put(wire.Command(id="a", kind="histogram", reason="curious", step=100))
        # An agent that is not busy looks every 5 s; one that logs looks once a second.
        eventually(lambda: run.log({"x": 1.0}) or waiting(run))
        outbox.put(wire.Command(id="b", kind="histogram", reason="at the very end", step=100))
        directory = run.directory
    out = recorded(directory)
    assert "one was asked for (curious), to be taken in step 100" in out.unavailable()["histogram"]
    assert [event.attributes["reason"] for event in out.of_kind("dropped")] == [ENDED]


def waiting(run):
    (wishes,) = run._watches.histograms._wishes
    return bool(wishes._new)


def bins_of(values):
    """The definition, in Python floats: the exponent of each magnitude."""
    counts = np.zeros(256, dtype=np.int64)
    for value in np.asarray(values, dtype=np.float64).ravel().tolist():
        if not math.isfinite(value):
            counts[255] += 1
        elif abs(value) < 2.0**-126:
            counts[0] += 1
        else:
            counts[min(math.frexp(abs(value))[1] + 126, 254)] += 1
    return counts


@pytest.mark.parametrize("scale", [1.0, 65536.0, 2.0**-3, 2.0**40])
def test_a_scale_that_is_a_power_of_two_moves_the_bins_exactly(scale):
    rng = np.random.default_rng(0)
    true = (rng.standard_normal(4000) * np.exp2(rng.integers(-60, 30, 4000))).astype(np.float32)
    true[:5] = [0.0, np.inf, -np.inf, np.nan, 2.0**-100]
    scaled = true * np.float32(scale)
    assert np.array_equal(scaled / np.float32(scale), true, equal_nan=True), "the test's own scaling is exact"
    moved = captured.unscaled(bins_of(scaled)[None].astype(float), scale)
    assert moved[0].tolist() == bins_of(true).tolist()


def test_what_falls_below_the_normal_range_lies_in_bin_0_and_no_element_is_lost():
    counts = np.arange(256, dtype=float)[None]
    for exponent in (-300, -127, -1, 1, 126, 200, 300):
        moved = captured.unscaled(counts, 2.0**exponent)
        assert moved.sum() == counts.sum()
        assert moved[0, 255] == 255
    assert captured.unscaled(counts, 2.0**10)[0, 0] == sum(range(11))


def test_other_scales_are_refused_and_parts_with_scales_of_their_own_are_moved_each_by_its_own():
    with pytest.raises(captured.NotCountable, match="no power of two"):
        captured.unscaled(np.zeros((1, 256)), 3.0)
    with pytest.raises(captured.NotCountable):
        captured.unscaled(np.zeros((1, 256)), float("nan"))
    one = np.zeros((1, 256))
    one[0, 130] = 5.0
    wish = Wish(reason="look")
    taken = [
        (captured.Histogram(wish=wish, parts=(((([row], KnownReadback(one)),), None),)), scale)
        for row, scale in ((0, None), (1, KnownReadback(np.array([4.0]))))
    ]
    joined = captured.joined([*taken, (None, None)])
    counts = joined.counts(3, None)
    assert (counts[0, 130], counts[1, 128], counts.sum()) == (5.0, 5.0, 10.0)
    assert captured.joined([(None, None)]) is None
    with pytest.raises(captured.NotCountable, match="2\\*\\*32"):
        captured.packed(np.full((1, 256), 2.0**32))


def histograms_of(directory):
    """Step -> (reason, counts of shape (layers, 256))."""
    found = {}
    for one in recorded(directory).details:
        if one.kind == "histogram":
            counts = np.frombuffer(one.values, "<u4").reshape(len(one.steps), -1, 256)
            found.update({step: (one.reason, counts[at]) for at, step in enumerate(one.steps)})
    return found


@pytest.fixture(params=["native", "torch"])
def kernel(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "load", lambda: None)
    elif native.load() is None:
        pytest.skip("no kernel here")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIOMETER_MODE", "offline")
    monkeypatch.setenv("GRADIOMETER_SPOOL", str(tmp_path / "spool"))


@pytest.mark.usefixtures("kernel", "offline")
def test_a_training_sends_what_its_gradients_are_in_the_steps_that_were_asked_for():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    full = {}
    with gm.init() as run:
        run.watch(model, optimizer, histogram_every=7)
        for step in range(1, 16):
            optimizer.zero_grad()
            model(torch.randint(0, 9, (4, 3))).square().mean().backward()
            if step == 3:
                run.histograms("look")
            if step == 10:
                model[2].bias.grad[1] = math.inf
            grads = [one.grad.to_dense() if one.grad.is_sparse else one.grad for one in model.parameters()]
            full[step] = np.stack([bins_of(grad.numpy()) for grad in grads])
            optimizer.step()
        directory = run.directory
    assert (run.failures, run.dropped) == ({}, {})
    found = histograms_of(directory)
    reasons = {step: reason for step, (reason, _) in found.items()}
    bad = "a gradient is not finite"
    assert reasons == {
        3: "look",
        7: "watch(histogram_every=7)",
        10: bad,
        11: f"{bad} (a step after it)",
        14: "watch(histogram_every=7)",
    }
    for step, (_, counts) in found.items():
        assert counts.tolist() == full[step].tolist(), step
    assert found[10][1][2, 255] == 1


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("init_scale", "exact"), [(1024.0, True), (1000.0, False)])
def test_under_a_scaler_that_the_optimizer_unscales_with_the_counts_are_of_the_unscaled_gradient(
    init_scale, exact
):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    with gm.init() as run:
        run.watch(model, optimizer, scaler)
        for step in range(1, 5):
            optimizer.zero_grad()
            inputs = torch.randn(8, 6)
            scaler.scale(model(inputs).square().mean()).backward()
            if step == 2:
                run.histograms()
                true = np.stack([bins_of((p.grad / init_scale).numpy()) for p in model.parameters()])
            if step == 3:
                # The scaler leaves such a step out, so it is nothing to look into.
                model.bias.grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
        directory = run.directory
    found = histograms_of(directory)
    if exact:
        assert list(found) == [2]
        assert found[2][1].tolist() == true.tolist()
    else:
        assert found == {}
        assert "1000 is no power of two" in recorded(directory).unavailable()["histogram"]


@pytest.mark.usefixtures("offline")
def test_several_optimizers_of_one_step_are_one_histogram_and_wrong_arguments_are_told():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    with gm.init() as run:
        run.histograms()
        run.watch(model, optimizers, histogram_every=0)
        for step in range(1, 4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.randn(4, 4)).square().mean().backward()
            if step == 2:
                run.histograms(object())
            full = np.stack([bins_of(one.grad.numpy()) for one in model.parameters()])
            for optimizer in optimizers:
                optimizer.step()
            if step == 2:
                expected = full
        directory = run.directory
        run.histograms()
    run.histograms("after the end")
    assert run.dropped == {NOTHING_WATCHED: 1}
    with gm.init(mode="disabled") as nothing:
        nothing.watch(model, optimizers, histogram_every=1)
        nothing.histograms()
    assert nothing.dropped == {}
    found = histograms_of(directory)
    assert list(found) == [2]
    assert found[2][1].tolist() == expected.tolist()
    assert "histogram_every=0" in recorded(directory).unavailable()["grad/layers"]


@pytest.mark.usefixtures("offline")
def test_a_histogram_that_fails_takes_no_statistics_along(monkeypatch):
    def fails(_gradients):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(eager, "read_histograms", fails)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gm.init() as run:
        run.watch(model, optimizer, histogram_every=2)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
        directory = run.directory
    out = recorded(directory)
    assert (run.failures, out.details) == ({}, [])
    assert sorted(out.layers["weight"]) == [1, 2, 3, 4, 5]
    assert "no memory left" in out.unavailable()["histogram"]
