"""How often gradients are read where reading them takes much of a step."""

from __future__ import annotations

import pytest
import torch

from gradiometer.capture import budget
from gradiometer.capture.budget import Budget, sentinels, wanted_every


class Loop:
    """Steps of a loop on a clock that only it moves."""

    def __init__(self) -> None:
        self.now_s, self.step = 0.0, 1
        self.told: list[tuple[int, str]] = []
        self.budget = Budget(
            lambda: self.step, lambda every, why: self.told.append((every, why)), lambda: self.now_s
        )

    def run(self, num_steps, reading_s, rest_s):
        """Steps in which a reading takes `reading_s` and everything else `rest_s`; those that were read."""
        read = []
        for _ in range(num_steps):
            if self.budget.is_due():
                assert self.budget.is_due(), "the same answer within a step"
                started_s = self.now_s
                self.now_s += reading_s
                self.budget.book(started_s)
                read.append(self.step)
            self.now_s += rest_s
            self.step += 1
        return read


@pytest.mark.parametrize(
    ("reading_s", "step_s", "every"),
    [
        (0.0009, 0.001, 1),
        (0.004, 0.4, 1),
        (0.004, 0.066, 8),
        (0.002, 0.066, 4),
        (0.0011, 0.066, 2),
        (1.0, 1.0, 8),
    ],
)
def test_the_budget_decides_how_often(reading_s, step_s, every):
    assert wanted_every(reading_s, step_s) == every


def test_a_dear_reading_rests_and_a_cheap_one_comes_back():
    loop = Loop()
    assert loop.run(budget.WINDOW, 0.004, 0.062) == list(range(1, 17)), "nothing is decided at once"
    read = loop.run(64, 0.004, 0.062)
    assert read == [step for step in range(17, 81) if (step - 1) // 8 > (step - 2) // 8 or step == 17]
    ((every, why),) = loop.told
    assert every == 8
    assert "6.1% of a step" in why
    # The batch is 20 times as large from now on.
    loop.run(2 * 8 * budget.WINDOW, 0.004, 1.2)
    assert loop.run(20, 0.004, 1.2) == list(range(loop.step - 20, loop.step))
    assert [every for every, _ in loop.told] == [8, 1]


def test_near_the_border_it_does_not_change_to_and_fro():
    loop = Loop()
    for turn in range(20):
        # 2.9 % and 3.1 % of a step: one of two steps would do for the one, one of four for the other.
        loop.run(4 * budget.WINDOW, 0.029 if turn % 2 else 0.031, 0.97)
    assert len(loop.told) == 1


def test_a_single_slow_step_decides_nothing():
    loop = Loop()
    loop.run(5, 0.004, 0.6)
    loop.run(1, 0.5, 3.0)
    loop.run(60, 0.004, 0.6)
    assert loop.told == []


def test_sentinels_are_the_smallest_and_the_first_of_equal_ones():
    sizes = [5000, 10, 4000, 10, 20_000, 10]
    parameters = [torch.empty(size) for size in sizes]
    assert sentinels(parameters, range(6)) == [0, 1, 2, 3, 5]
    assert sentinels(parameters, [4]) == [4], "there is always one"
    many = [torch.empty(4) for _ in range(200)]
    assert sentinels(many, range(200)) == list(range(budget.MAX_SENTINELS))
