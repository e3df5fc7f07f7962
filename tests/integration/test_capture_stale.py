"""What is recorded is the gradient that the optimizer gets, also where norms are taken or clips made before it is complete."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture.statistics import SUM
from tests.support.recorded import recorded


class Loop:
    """Two parameters of three elements; every backward pass adds `factor` to each element of both gradients."""

    def __init__(self, run):
        self.model = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(3)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        run.watch(self.model, self.optimizer)

    @property
    def parameters(self):
        return list(self.model.parameters())

    def backward(self, factor=1.0):
        sum(factor * parameter.sum() for parameter in self.parameters).backward()

    def clip(self, max_norm=1.0, **options):
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, **options)

    def zero(self):
        self.optimizer.zero_grad(set_to_none=False)

    def step(self):
        self.optimizer.step()


def sums(play, path):
    """The recorded sum of each gradient by step, and what else was recorded."""
    with gm.init(mode="offline", spool=path) as run:
        play(Loop(run))
        directory = run.directory
    assert run.failures == {}
    out = recorded(directory)
    return {
        name: {step: pytest.approx(row[SUM]) for step, row in rows.items()}
        for name, rows in out.layers.items()
    }, out


def norm_of_every_micro_batch(loop):
    for _ in range(2):
        loop.backward()
        loop.clip(1e9)
    loop.step()


def total_norm_of_every_micro_batch(loop):
    for _ in range(2):
        loop.backward()
        nn.utils.get_total_norm([parameter.grad for parameter in loop.parameters])
    loop.step()


def clipped_then_more_accumulated(loop):
    loop.backward()
    loop.clip()
    loop.zero()
    loop.backward(1.0)
    loop.clip(1e9)
    loop.backward(1.0)
    loop.step()


def clipped_zeroed_and_refilled_without_a_clip(loop):
    loop.backward()
    loop.clip()
    loop.zero()
    loop.backward(2.0)
    loop.step()


def clipped_zeroed_and_refilled_at_once(loop):
    loop.backward()
    loop.clip()
    for parameter in loop.parameters:
        parameter.grad.fill_(2.0)
    loop.step()


def clipped_once(loop):
    loop.backward(2.0)
    loop.clip()
    loop.step()


def clipped_one_by_one(loop):
    loop.backward(2.0)
    loop.clip(foreach=False)
    loop.step()


def clipped_four_times(loop):
    loop.backward(2.0)
    for _ in range(4):
        loop.clip(0.5)
    loop.step()


def clipped_by_group_twice(loop):
    loop.backward(2.0)
    for _ in range(2):
        for parameter in loop.parameters:
            nn.utils.clip_grad_norm_([parameter], 0.1)
    loop.step()


def clipped_in_two_halves(loop):
    loop.backward(2.0)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in loop.parameters])
    nn.utils.clip_grads_with_norm_(iter(loop.parameters), 0.1, norm)
    loop.step()


def clipped_by_a_norm_of_the_loop_itself(loop):
    loop.backward(2.0)
    nn.utils.clip_grads_with_norm_(loop.parameters, 0.1, torch.tensor(5.0))
    loop.step()


def clipped_by_norm_and_by_value(loop):
    loop.backward(2.0)
    loop.clip()
    nn.utils.clip_grad_value_(iter(loop.parameters), 0.01)
    loop.step()


def clipped_by_group_in_one_bucket(loop):
    # As DDP's gradient_as_bucket_view: the gradients share one memory and one count of changes.
    bucket = torch.full((6,), 2.0)
    for index, parameter in enumerate(loop.parameters):
        parameter.grad = bucket[3 * index : 3 * index + 3]
    for parameter in loop.parameters:
        nn.utils.clip_grad_norm_([parameter], 0.1)
    loop.step()


LOOPS = [
    norm_of_every_micro_batch,
    total_norm_of_every_micro_batch,
    clipped_then_more_accumulated,
    clipped_zeroed_and_refilled_without_a_clip,
    clipped_zeroed_and_refilled_at_once,
    clipped_once,
    clipped_one_by_one,
    clipped_four_times,
    clipped_by_group_twice,
    clipped_in_two_halves,
    clipped_by_a_norm_of_the_loop_itself,
    clipped_by_norm_and_by_value,
    clipped_by_group_in_one_bucket,
]


@pytest.mark.parametrize("play", LOOPS, ids=lambda play: play.__name__)
def test_the_gradient_of_the_step_before_clipping_is_recorded(play, tmp_path):
    found, _ = sums(play, tmp_path)
    assert found == {"a": {1: 6.0}, "b": {1: 6.0}}


def test_one_clip_and_a_step_read_once(tmp_path, monkeypatch):
    from gradiometer.capture.gradients import GradientReader

    num_reads = 0
    original = GradientReader.read

    def read(self, *arguments, **options):
        nonlocal num_reads
        num_reads += 1
        return original(self, *arguments, **options)

    monkeypatch.setattr(GradientReader, "read", read)

    def play(loop):
        for _ in range(5):
            loop.zero()
            loop.backward()
            loop.clip(0.1)
            loop.step()

    found, out = sums(play, tmp_path)
    assert num_reads == 5
    assert found["a"] == dict.fromkeys(range(1, 6), 3.0)
    assert out.points["grad/clip_norm"] == pytest.approx(dict.fromkeys(range(1, 6), 6**0.5))


def test_a_norm_of_a_gradient_that_was_thrown_away_is_not_the_steps(tmp_path):
    _, out = sums(clipped_zeroed_and_refilled_without_a_clip, tmp_path)
    assert "grad/clip_norm" not in out.points


def test_clipping_another_model_does_not_hide_a_new_gradient(tmp_path):
    def play(loop):
        loop.backward()
        loop.clip()
        loop.backward(10.0)
        other = nn.Linear(2, 1)
        other(torch.ones(1, 2)).sum().backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        loop.zero()
        loop.backward(2.0)
        loop.step()

    found, _ = sums(play, tmp_path)
    assert found == {"a": {1: 6.0}, "b": {1: 6.0}}


def test_torch_is_as_it_was_after_the_run(tmp_path):
    from torch.nn.utils import clip_grad

    wrappers = [clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_]
    before = [(wrapper, wrapper.__closure__[0].cell_contents) for wrapper in wrappers]
    sums(clipped_once, tmp_path)
    after = [clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_]
    assert [(wrapper, wrapper.__closure__[0].cell_contents) for wrapper in after] == before


def noise_after_the_clip(loop):
    loop.backward(2.0)
    loop.clip()
    for parameter in loop.parameters:
        parameter.grad.add_(1.0)
    loop.step()


@pytest.mark.parametrize("play", [noise_after_the_clip, clipped_zeroed_and_refilled_without_a_clip])
def test_why_the_norm_of_a_clip_is_not_the_steps(play, tmp_path):
    _, out = sums(play, tmp_path)
    assert "grad/clip_norm" not in out.points
    assert "changed between clip_grad_norm_ and optimizer.step()" in out.unavailable()["grad/clip_norm"]


@pytest.mark.parametrize("play", [norm_of_every_micro_batch, clipped_once])
def test_a_norm_that_is_the_steps_is_not_said_to_be_lost(play, tmp_path):
    _, out = sums(play, tmp_path)
    assert "grad/clip_norm" not in out.unavailable()
