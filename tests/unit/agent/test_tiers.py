"""Which statistics are read in which step, what that depends on, and how the parts of one step fit together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gradiometer import guard as guard_module
from gradiometer import wire
from gradiometer.capture import gradients, kernel, native, statistics, tiers
from gradiometer.capture.backends import Backends, Found, OnlyNorms, known_finite
from gradiometer.capture.clock import StepClock, StepNumbers
from gradiometer.capture.readback import HostReadback, KnownReadback
from gradiometer.capture.tiers import Cadence, Tier

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")
FLOAT32 = {torch.float32}


class Steps:
    """A cadence and the step that it is asked about."""

    def __init__(self, every):
        self.step = 0
        self.cadence = Cadence(Tier(every=every, why=""), lambda: self.step)

    def full(self, steps):
        found = []
        for self.step in steps:
            if self.cadence.is_full():
                found.append(self.step)
        return found


@pytest.fixture
def no_native(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "why_not", lambda: "taken away")


@pytest.mark.parametrize(
    ("every", "steps", "full"),
    [
        (1, [1, 2, 3], [1, 2, 3]),
        (0, [1, 2, 3], []),
        (5, range(1, 14), [1, 6, 11]),
        (5, range(18, 28), [18, 21, 26]),
        (5, range(2, 20, 2), [2, 6, 12, 16]),
        (2, [0, 1, 2, 3], [0, 1, 3]),
    ],
    ids=["each", "never", "from the start", "resumed", "an optimizer that rests", "before the first"],
)
def test_the_first_step_of_each_stretch_is_full(every, steps, full):
    assert Steps(every).full(steps) == full


def test_a_step_that_is_read_again_is_as_full_as_before():
    assert Steps(4).full([1, 1, 2, 2, 5, 5, 5, 6]) == [1, 1, 5, 5, 5]


def test_broken_steps_are_read_in_full_until_it_is_clear_that_they_stay_broken():
    cadence = Steps(50).cadence
    told = [cadence.is_full_too(finite=False) for _ in range(tiers.MAX_BROKEN + 3)]
    assert told == [True] * tiers.MAX_BROKEN + [False] * 3
    assert not cadence.is_full_too(finite=True)
    assert cadence.is_full_too(finite=False)
    assert not Steps(0).cadence.is_full_too(finite=False), "whoever wants norms alone gets norms alone"


def test_the_number_of_the_step_under_way_is_the_one_that_it_will_get():
    clock = StepClock(7)
    leader, first, second = (StepNumbers(clock, is_clock=is_clock) for is_clock in (True, False, False))
    for _ in range(2):
        for numbers in (first, leader, second):
            coming = numbers.coming()
            assert (coming, True) == numbers.next()


def test_what_auto_chooses_depends_on_what_one_pass_gives(monkeypatch, no_native):
    monkeypatch.setattr(kernel, "prepare", lambda device, dtypes: "no Triton")
    for device, reason in ((CPU, "taken away"), (CUDA, "no Triton"), (MPS, "no kernel for mps")):
        tier = tiers.choose("auto", None, device, FLOAT32)
        assert (tier.every, reason in tier.why) == (tiers.DEFAULT_EVERY, True), device
        assert "one of 50 steps" in tier.lack
        assert "every 50 steps" in tier.told
    monkeypatch.setattr(native, "why_not", lambda: None)
    monkeypatch.setattr(kernel, "prepare", lambda device, dtypes: None)
    for device, name in ((CPU, "native"), (CUDA, "Triton")):
        tier = tiers.choose("auto", None, device, FLOAT32)
        assert (tier.every, tier.lack, name in tier.told) == (1, None, True)


@pytest.mark.parametrize(
    ("statistics_", "every", "expected"),
    [("norm", None, 0), ("norm", 5, 0), ("full", None, 1), ("full", 7, 7), ("auto", 3, 3)],
)
def test_the_users_wish_comes_first(no_native, statistics_, every, expected):
    assert tiers.choose(statistics_, every, CPU, FLOAT32).every == expected


@pytest.mark.parametrize(
    ("statistics_", "every", "told"),
    [
        ("all", None, "'all'"),
        ("auto", 0, "every=0"),
        ("auto", 2.5, "every=2.5"),
        ("auto", True, "every=True"),
    ],
)
def test_a_wish_that_cannot_be_is_told_and_auto_is_used(statistics_, every, told):
    mistakes = []
    tier = tiers.of_watch(nn.Linear(2, 2), statistics_, every, lambda metric, reason: mistakes.append(reason))
    assert tier == tiers.of_watch(nn.Linear(2, 2), "auto", None, lambda *_: pytest.fail("nothing is wrong"))
    assert len(mistakes) == 1
    assert told in mistakes[0]


def test_on_a_cpu_the_kernel_of_gpus_is_not_in_use():
    assert not kernel.is_ready(CPU, torch.float32)
    assert not kernel.is_ready(CUDA, torch.float32)


def test_norms_of_any_gradient_are_columns_of_all_its_statistics(no_native):
    found = Found()
    sparse = torch.sparse_coo_tensor([[0, 0], [1, 1]], [3.0, 4.0], (2, 2), check_invariants=True)
    for row, gradient in enumerate([torch.randn(33), torch.randn(5).half(), sparse, torch.zeros(4)]):
        found.add(row, gradient)
    tables = []
    for full in (True, False):
        table = np.zeros((4, 7 if full else 3))
        for rows, block in Backends().read(found, full=full):
            table[rows] = block.values()
        tables.append(table)
    np.testing.assert_allclose(tables[0][:, statistics.NORMS], tables[1], rtol=1e-6)
    assert tables[1][2].tolist() == [4, 49, 0]


def test_what_is_still_on_a_device_is_not_asked_whether_it_is_finite():
    bad = np.array([[2.0, np.nan, 1.0]])
    assert known_finite((([0], HostReadback(torch.tensor(bad))),))
    assert not known_finite((([0], KnownReadback(bad)),))
    overflowed = np.array([[2.0, np.inf, 0.0]])
    assert known_finite((([0], KnownReadback(overflowed)),)), "the squares of finite elements"
    overflowed[0, 2] = 1.0
    assert not known_finite((([0], KnownReadback(overflowed)),))


def test_norms_divided_by_the_scale_are_the_columns_of_the_statistics_divided_by_it():
    table = np.array([[4.0, 8.0, 64.0, -4.0, 6.0, 1.0, 0.0]])
    whole = statistics.unscale(table, 4.0)
    assert whole.tolist() == [[4.0, 2.0, 4.0, -1.0, 1.5, 1.0, 0.0]]
    norms = statistics.unscale(table[:, statistics.NORMS], 4.0, wire.NORM_STATISTICS)
    assert norms.tolist() == whole[:, statistics.NORMS].tolist()


def test_a_step_of_several_optimizers_has_what_was_read_of_all():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    full = gradients.GradientReader(model, optimizer, "", lambda *_: None).read()
    block = full.blocks[0][1]
    norms = gradients.Partials(
        layout=full.layout,
        blocks=(([0, 1], OnlyNorms(block)),),
        statistics=wire.NORM_STATISTICS,
        unread=(1,),
    )
    scale = KnownReadback(np.array(2.0))
    combined, rest = gradients.combine([(full, None), (norms, scale)])
    assert (combined.statistics, rest) == (wire.NORM_STATISTICS, None)
    assert combined.table().shape == (2, 3)
    assert combined.table()[0, 1] == full.table()[0, statistics.SUM_SQUARES] / 4
    assert np.isnan(combined.table()[1, 1])
    assert gradients.combine([(full, None), (full, None)])[0].statistics == wire.STATISTICS


def test_time_inside_the_agent_is_booked_once(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(guard_module.time, "perf_counter", lambda: next(now))
    one = guard_module.Guard()
    assert one.entered("outer", lambda: one.entered_tolerantly("inner", lambda: 7)) == 7
    assert one.spent_s == 1
    assert one.entered_tolerantly("log", lambda: None) is None
    assert one.spent_s == 2
    with pytest.raises(KeyboardInterrupt):
        one.entered("outer", _interrupt)
    one.entered("outer", lambda: None)
    assert one.spent_s == 4, "an interrupt does not end the booking"


def _interrupt():
    raise KeyboardInterrupt
