"""No check says anything about a training loop that is right, whatever its shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture.checks import coverage
from tests.support.recorded import recorded

STEPS = coverage.JUDGED_AFTER + 2


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model):
    return nn.functional.mse_loss(model(torch.randn(6, 8)), torch.randn(6, 4))


def plain(run, zero="end", set_to_none=True):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.watch(model, optimizer)
    for _ in range(STEPS):
        if zero == "before forward":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model)
        if zero == "before backward":
            optimizer.zero_grad(set_to_none=set_to_none)
        run.log({"train/loss": loss})
        loss.backward()
        optimizer.step()
        if zero == "end":
            optimizer.zero_grad(set_to_none=set_to_none)


def accumulation(run, *, how):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.watch(model, optimizer)
    for _ in range(STEPS):
        for _ in range(4):
            if how == "tokens":
                # As transformers does it: a sum over tokens, divided by the number of tokens in the whole step.
                loss = (
                    nn.functional.mse_loss(model(torch.randn(6, 8)), torch.randn(6, 4), reduction="sum") / 96
                )
                run.log({"train/loss": loss})
            elif how == "divided before it is logged":
                loss = loss_of(model) / 4
                run.log({"train/loss": loss})
            else:
                loss = loss_of(model)
                run.log({"train/loss": loss})
                loss = loss if how == "divided at the end" else loss / 4
            loss.backward()
        if how == "divided at the end":
            for parameter in model.parameters():
                parameter.grad.div_(4)
        optimizer.step()
        optimizer.zero_grad()


def scaled(run, *, fused=False, clip=None, accumulate=1, divide_after=False):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    run.watch(model, optimizer, scaler)
    for step in range(STEPS):
        for _ in range(accumulate):
            loss = loss_of(model)
            run.log({"train/loss": loss})
            scaler.scale(loss if divide_after else loss / accumulate).backward()
        if step == 5:
            # A step that the scaler skips.
            model[0].weight.grad.fill_(float("inf"))
        if clip == "after unscale":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif clip == "bound times scale":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())
        elif clip == "only measured":
            nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        if divide_after:
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                parameter.grad.div_(accumulate)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def disabled_scaler(run):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.watch(model, optimizer)
    for _ in range(STEPS):
        scaler.scale(loss_of(model)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def gan(run, *, set_to_none, detach):
    """The order of PyTorch's own DCGAN example: the generator's loss leaves gradients in the discriminator."""
    generator, critic = make(1), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    run.watch(critic, of_critic)
    run.watch(generator, of_generator, name="generator")
    for _ in range(STEPS):
        for _ in range(3):
            of_critic.zero_grad(set_to_none=set_to_none)
            real = critic(torch.randn(5, 4)).square().mean()
            run.log({"train/loss_real": real})
            real.backward()
            made = generator(torch.randn(5, 8))
            fake = critic(made.detach() if detach else made).mean()
            run.log({"train/d_loss": fake})
            fake.backward()
            of_critic.step()
        of_generator.zero_grad(set_to_none=set_to_none)
        loss = critic(generator(torch.randn(5, 8))).mean()
        run.log({"train/g_loss": loss})
        loss.backward()
        of_generator.step()


def sharpness_aware(run, *, set_to_none):
    """Two backward passes per step, with the gradients cleared in between."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    run.watch(model, optimizer)
    for _ in range(STEPS):
        loss = loss_of(model)
        run.log({"train/loss": loss})
        loss.backward()
        moved = [0.01 * parameter.grad for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moved, strict=True):
                parameter.add_(move)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model)
        run.log({"train/loss": loss})
        loss.backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moved, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def closure(run):
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    run.watch(model, optimizer)
    x, y = torch.randn(6, 8), torch.randn(6, 4)

    def evaluate():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        run.log({"train/loss": loss})
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(evaluate)


def functional_gradients(run):
    """Gradients set by hand, and never cleared."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.watch(model, optimizer)
    for step in range(STEPS):
        loss = loss_of(model)
        run.log({"train/loss": loss})
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            if step == 0:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
        optimizer.step()


def two_optimizers(run, *, watched):
    model = make()
    first = torch.optim.SGD(model[0].parameters(), lr=1e-2)
    second = torch.optim.Adam(model[2].parameters(), lr=1e-3)
    run.watch(model, first)
    if watched:
        run.watch(model, second, name="second")
    for _ in range(STEPS):
        loss = loss_of(model)
        run.log({"train/loss": loss})
        loss.backward()
        first.step()
        second.step()
        model.zero_grad()


def fine_tuning(run):
    model = make()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.watch(model, optimizer)
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def warm_up_and_down(run):
    """R69, first case: the learning rate is 0 at the first step, and at the last two."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.0 if step in (0, STEPS - 2, STEPS - 1) else 1e-3
    )
    run.watch(model, optimizer)
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


LOOPS = {
    "plain": lambda run: plain(run),
    "plain, zeros kept": lambda run: plain(run, set_to_none=False),
    "zero_grad before forward": lambda run: plain(run, "before forward"),
    "zero_grad before forward, zeros kept": lambda run: plain(run, "before forward", set_to_none=False),
    "zero_grad before backward": lambda run: plain(run, "before backward"),
    "zero_grad before backward, zeros kept": lambda run: plain(run, "before backward", set_to_none=False),
    "accumulation": lambda run: accumulation(run, how="divided"),
    "accumulation by tokens": lambda run: accumulation(run, how="tokens"),
    "accumulation, divided before it is logged": lambda run: accumulation(run, how="divided before it is logged"),
    "accumulation, divided at the end": lambda run: accumulation(run, how="divided at the end"),
    "scaler": lambda run: scaled(run),
    "scaler, fused": lambda run: scaled(run, fused=True),
    "scaler, accumulation, clip after unscale": lambda run: scaled(run, accumulate=3, clip="after unscale"),
    "scaler, fused, clip after unscale": lambda run: scaled(run, fused=True, clip="after unscale"),
    "scaler, bound times scale": lambda run: scaled(run, clip="bound times scale"),
    "scaler, only measured": lambda run: scaled(run, clip="only measured"),
    "scaler, accumulation, divided at the end": lambda run: scaled(run, accumulate=3, divide_after=True),
    "disabled scaler": disabled_scaler,
    "gan": lambda run: gan(run, set_to_none=True, detach=True),
    "gan, zeros kept": lambda run: gan(run, set_to_none=False, detach=True),
    "gan without detach": lambda run: gan(run, set_to_none=True, detach=False),
    "gan without detach, zeros kept": lambda run: gan(run, set_to_none=False, detach=False),
    "two passes per step": lambda run: sharpness_aware(run, set_to_none=True),
    "two passes per step, zeros kept": lambda run: sharpness_aware(run, set_to_none=False),
    "closure": closure,
    "gradients set by hand": functional_gradients,
    "two optimizers": lambda run: two_optimizers(run, watched=True),
    "two optimizers, one watched": lambda run: two_optimizers(run, watched=False),
    "fine-tuning with frozen parameters in the optimizer": fine_tuning,
    "R69: learning rate 0 at the first and the last step": warm_up_and_down,
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_no_check_fires(name, spool):
    with gm.init(mode="offline") as run:
        LOOPS[name](run)
        directory = run.directory
        assert run.step >= STEPS
    assert run.failures == {}
    assert [event.attributes for event in recorded(directory).of_kind("check")] == []


def test_a_continued_run_with_its_optimizer_state(spool):
    model = make()
    before = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model).backward()
    before.step()
    before.zero_grad()
    for kind, keeps in ((torch.optim.AdamW, True), (torch.optim.SGD, False)):
        with gm.init(mode="offline", start_step=1) as run:
            optimizer = kind(model.parameters(), lr=1e-3)
            run.watch(model, optimizer)
            if keeps:
                optimizer.load_state_dict(before.state_dict())
            for _ in range(25):
                loss_of(model).backward()
                optimizer.step()
                optimizer.zero_grad()
            directory = run.directory
        assert recorded(directory).of_kind("check") == []
