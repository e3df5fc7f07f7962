"""When the steps of several optimizers are one step: tables of what happens, in order."""

from __future__ import annotations

import pytest

from gradiometer.capture.together import Together


class Story:
    """Plays events over optimizers 0 to `count` - 1 and writes down who stepped in which step."""

    def __init__(self, count, live=None):
        self.together = Together()
        self.live = set(range(count)) if live is None else set(live)
        self.steps = []
        self.now = ""
        self.new_gradients = False

    def end(self):
        self.steps.append(self.now)
        self.now = ""
        self.together.complete()

    def step(self, index, *, in_backward=False):
        # One that has nothing to train gets no gradients.
        is_new = self.new_gradients and bool(self.live & set(map(int, self.now)))
        if self.together.begins_another(index, in_backward=in_backward, has_new_gradients=lambda: is_new):
            self.end()
        self.new_gradients = False
        self.now += str(index)
        if self.together.stepped(index, in_backward=in_backward, live=lambda: set(self.live)):
            self.end()

    def backward_ends(self):
        if self.together.backward_ended():
            self.end()

    def play(self, script):
        """Digits: optimizer steps; b: backward pass; lower case letters a, c, d: optimizers 0, 1, 2 step in it; |: it ends."""
        for char in script:
            if char.isdigit():
                self.step(int(char))
            elif char == "b":
                self.new_gradients = bool(self.now)
            elif char == "|":
                self.backward_ends()
            else:
                self.step("acd".index(char), in_backward=True)
        return self.steps, self.now


def test_one_optimizer():
    assert Story(1).play("b0b00b0") == (["0", "0", "0", "0"], "")


@pytest.mark.parametrize(
    ("script", "steps", "under_way"),
    [
        ("b01b01", ["01", "01"], ""),
        ("b10b01", ["10", "01"], ""),
        ("b0b1b0b1", ["0", "1", "0"], "1"),
        # The second rests in the second round; the order does not shift afterwards.
        ("b01b0b01b01", ["01", "0", "01", "01"], ""),
        ("b10b0b10b10", ["10", "0", "10", "10"], ""),
        # The second never steps.
        ("b0b0b0", ["0", "0"], "0"),
        # Without a backward pass in between, one that steps twice has begun another step.
        ("0001", ["0", "0", "01"], ""),
    ],
)
def test_two_optimizers(script, steps, under_way):
    assert Story(2).play(script) == (steps, under_way)


def test_one_that_has_nothing_to_train_is_not_waited_for():
    assert Story(2, live={0}).play("b0b0") == (["0", "0"], "")
    assert Story(2, live={0}).play("b01b01") == (["0", "10"], "1")
    assert Story(2, live=set()).play("b0b1") == (["0", "1"], "")


@pytest.mark.parametrize(
    ("script", "steps", "under_way"),
    [
        ("bdca|bdca|", ["210", "210"], ""),
        # The last has no gradient in the first pass: its step ends when the next pass begins to step.
        ("bdc|bdc|bdc|", ["21", "21", "21"], ""),
        # It comes first when it comes: the step before is not its own.
        ("bdc|badc|bdc|bdc|", ["21", "021", "21", "21"], ""),
        # One of them steps after the backward pass.
        ("bdc|0bdc|0bdc|0", ["210", "210", "210"], ""),
        ("bdc|0bd|0bc|0", ["210", "20", "10"], ""),
    ],
)
def test_optimizers_in_the_backward_pass(script, steps, under_way):
    assert Story(3).play(script) == (steps, under_way)


def test_the_end_of_a_backward_pass_without_steps_is_no_step():
    assert Story(2).play("b|b|b01b|") == (["01"], "")
