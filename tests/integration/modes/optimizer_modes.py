"""Modes of one process: several optimizers, several models, optimizers inside the backward pass."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn

from tests.integration.modes.loop_modes import (
    BAD_STEP,
    BEFORE_CLIP,
    CLIP,
    ONCE,
    SCALE,
    STEPS,
    adamw,
    gradients_with_an_infinity,
)
from tests.integration.modes.mode_framework import Mode, outcome, weights_of
from tests.integration.modes.mode_net import (
    gradients_of_part,
    loss_of,
    loss_of_part,
    make_net,
    make_with_unused,
)

PER_PARAMETER = "each gradient when its own optimizer steps: per parameter, pre-clip"
WATCH_LIST = "`watch(model, [first, second])`: the step is complete when both have stepped"

# -- several optimizers ---------------------------------------------------------------------------------------------


def split(model):
    """Matrices to one optimizer, the rest to another."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return (
        torch.optim.SGD(matrices, lr=1e-2, momentum=0.9),
        torch.optim.AdamW([{"params": rest[:2]}, {"params": rest[2:], "lr": 1e-3}], lr=1e-2),
    )


def optimizers_in_turn(session, *, named):
    model = make_net()
    optimizers = split(model)
    session.watch(model, {"matrices": optimizers[0], "rest": optimizers[1]} if named else list(optimizers))
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            session.log({"train/loss": loss})
        model.zero_grad()
    return outcome(model, *optimizers)


def optimizers_scaled(session):
    """Each optimizer is unscaled and skipped for itself; here only one of them is unscaled before its step."""
    model = make_net()
    optimizers = split(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    session.watch(model, optimizers, scaler)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        for micro_batch in range(2):
            scaler.scale(loss_of(model, step, 0, micro_batch) / 2).backward()
        if step == BAD_STEP:
            model.second.weight.grad[3, 3] = math.inf
        scaler.unscale_(optimizers[1])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    return outcome(model, *optimizers)


class Pair(nn.Module):
    """A generator of 3 numbers from noise, or its critic."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.norm = nn.LayerNorm(width_in)
        self.body = nn.Linear(width_in, 5)
        self.head = nn.Linear(5, width_out)

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.norm(x))))


def make_pair(seed, width_in, width_out):
    torch.manual_seed(seed)
    return Pair(width_in, width_out)


def noise(step, index):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + index))


def critic_loss(generator, critic, step, index):
    real = 2.0 + torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + 50 + index))
    with torch.no_grad():
        fake = generator(noise(step, index))
    return nn.functional.softplus(critic(fake)).mean() + nn.functional.softplus(-critic(real)).mean()


def generator_loss(generator, critic, step):
    return nn.functional.softplus(-critic(generator(noise(step, 9)))).mean()


def copy_of(model, width_in, width_out):
    fresh = Pair(width_in, width_out)
    fresh.load_state_dict(model.state_dict())
    return fresh


def gan(session, *, critic_first, critic_steps):
    """Two models, two optimizers, two watches; the generator is the clock."""
    generator, critic = make_pair(1, 4, 3), make_pair(2, 3, 1)
    generator_optimizer, critic_optimizer = adamw(generator), adamw(critic)
    session.watch(generator, generator_optimizer)
    session.watch(critic, critic_optimizer, name="critic")

    def train_critic(step):
        expected = None
        for index in range(critic_steps):
            with torch.random.fork_rng():
                fresh = copy_of(critic, 3, 1)
                critic_loss(copy_of(generator, 4, 3), fresh, step, index).backward()
            expected = expected or {f"critic.{n}": p.grad for n, p in fresh.named_parameters()}
            critic_loss(generator, critic, step, index).backward()
            critic_optimizer.step()
            critic.zero_grad()
        return expected

    def train_generator(step):
        with torch.random.fork_rng():
            fresh = copy_of(generator, 4, 3)
            generator_loss(fresh, copy_of(critic, 3, 1), step).backward()
        generator_loss(generator, critic, step).backward()
        generator_optimizer.step()
        generator.zero_grad()
        critic.zero_grad()
        return {name: parameter.grad for name, parameter in fresh.named_parameters()}

    for step in range(1, STEPS + 1):
        halves = (train_critic, train_generator) if critic_first else (train_generator, train_critic)
        first, second = halves[0](step), halves[1](step)
        session.expect(step, {**first, **second})
    return [*outcome(generator, generator_optimizer), *outcome(critic, critic_optimizer)]


# -- optimizers in the backward pass --------------------------------------------------------------------------------


def in_backward(session):
    model = make_with_unused()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    session.watch(model, list(optimizers.values()))
    steps = []
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        loss_of_part(model, step).backward()
        steps.append(None if session.run is None else session.run.step)
    session.notes["steps"] = steps
    return outcome(model, *optimizers.values())


def in_backward_by_torch(session):
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers

    model = make_net()
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 1e-2})
    session.watch(model, None)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        loss_of(model, step).backward()
    return outcome(model, *_get_in_backward_optimizers(model))


MODES = [
    Mode(
        name="two optimizers, one step",
        train=functools.partial(optimizers_in_turn, named=False),
        reads=BEFORE_CLIP,
        remarks=WATCH_LIST,
    ),
    Mode(
        name="two optimizers by name, one step",
        train=functools.partial(optimizers_in_turn, named=True),
        reads=BEFORE_CLIP,
        remarks='`watch(model, {"matrices": first, "rest": second})`; learning rates are `train/lr/matrices`, ...',
    ),
    Mode(
        name="two optimizers and a GradScaler, one step",
        train=optimizers_scaled,
        reads=f"{ONCE}, unscaled; a skipped step too",
        reference=gradients_with_an_infinity,
        remarks="a step counts as skipped if one of the optimizers was",
    ),
    Mode(
        name="two models in turn, the clock's first",
        train=functools.partial(gan, critic_first=False, critic_steps=1),
        reads="each gradient when its optimizer steps",
        remarks="two `watch` calls; the second with `name=`",
    ),
    Mode(
        name="two models in turn, the clock's last",
        train=functools.partial(gan, critic_first=True, critic_steps=1),
        reads="each gradient when its optimizer steps",
    ),
    Mode(
        name="two models in turn, one three times as often",
        train=functools.partial(gan, critic_first=True, critic_steps=3),
        reads="each gradient when its optimizer steps",
        remarks="of the three, the first is recorded: watch that model first to make it the clock",
    ),
    Mode(
        name="optimizer in backward, one per parameter",
        train=in_backward,
        reads=PER_PARAMETER,
        reference=gradients_of_part,
        unavailable=("grad/clip_norm",),
        remarks="`watch(model, list_of_optimizers)`; the step ends with the backward pass; 32 learning rates at most",
    ),
    Mode(
        name="optimizer in backward, by `_apply_optimizer_in_backward`",
        train=in_backward_by_torch,
        reads=PER_PARAMETER,
        unavailable=("grad/clip_norm",),
        remarks="`watch(model, None)` finds the optimizers",
    ),
]
