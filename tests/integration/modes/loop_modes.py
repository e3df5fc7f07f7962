"""Modes of one process: accumulation, clipping, loss scaling, closures."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn

from tests.integration.modes.mode_framework import Mode, Session, outcome, weights_of
from tests.integration.modes.mode_net import loss_of, make_net

ONCE = "the gradient, once per optimizer step"
BEFORE_CLIP = "the gradient before clipping, once per optimizer step"
STEPS = 3
BAD_STEP = 2
CLIP = 0.05
SCALE = 2.0**12


def train(
    session: Session, model, optimizer, *, micro_batches=1, clip=None, after_step=None, set_to_none=True
):
    """An ordinary loop."""
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        for micro_batch in range(micro_batches):
            loss = loss_of(model, step, 0, micro_batch) / micro_batches
            loss.backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        session.log({"train/loss": loss})
        if after_step is not None:
            after_step(step)
    return outcome(model, optimizer)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def plain(session):
    model = make_net()
    return train(session, model, adamw(model))


def accumulation(session):
    model = make_net()
    return train(session, model, adamw(model), micro_batches=4)


def clipped_by_norm(session):
    model = make_net()
    return train(
        session, model, adamw(model), clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    )


def clipped_by_value(session):
    model = make_net()
    return train(
        session, model, adamw(model), clip=lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001)
    )


def zeroed_in_place(session):
    model = make_net()
    return train(session, model, adamw(model), set_to_none=False, micro_batches=2)


# -- loss scaling ---------------------------------------------------------------------------------------------------

OPTIMIZERS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CLIPS = ("not clipped", "clipped after unscale", "clipped before unscale")


def scaled(session, *, kind, clip):
    """One of the steps has an infinity in its gradient, and is skipped."""
    model = make_net()
    optimizer = adamw(model, **OPTIMIZERS[kind])
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
    session.watch(model, optimizer, scaler)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        for micro_batch in range(2):
            scaler.scale(loss_of(model, step, 0, micro_batch) / 2).backward()
        if step == BAD_STEP:
            model.second.weight.grad[3, 3] = math.inf
        if clip == "clipped after unscale":
            scaler.unscale_(optimizer)
        if clip != "not clipped":
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return outcome(model, optimizer)


def gradients_with_an_infinity(step, weights):
    gradients = Mode(name="", train=scaled, reads="", micro_batches=2).gradients(step, weights)
    if step == BAD_STEP:
        gradients["second.weight"][3, 3] = math.inf
    return gradients


def scaled_mode(kind, clip):
    reads = BEFORE_CLIP if clip != "not clipped" else ONCE
    return Mode(
        name=f"GradScaler, {kind} optimizer, {clip}",
        train=functools.partial(scaled, kind=kind, clip=clip),
        reads=f"{reads}, unscaled; a skipped step too",
        reference=gradients_with_an_infinity,
        unavailable=("grad/clip_norm",) if clip == "clipped before unscale" else (),
        findings=("clip_before_unscale",) if clip == "clipped before unscale" else (),
        remarks="the norm that the clip returned is `grad/clip_norm_scaled`" if "before" in clip else "",
    )


# -- closures -------------------------------------------------------------------------------------------------------


def closure(session, *, make):
    model = make_net()
    optimizer = make(model)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))

        def evaluate(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return outcome(model, optimizer)


MODES = [
    Mode(name="plain", train=plain, reads=ONCE),
    Mode(
        name="gradient accumulation",
        train=accumulation,
        reads="the accumulated gradient, once per optimizer step",
        micro_batches=4,
    ),
    Mode(name="clipped by norm", train=clipped_by_norm, reads=BEFORE_CLIP),
    Mode(name="clipped by value", train=clipped_by_value, reads=BEFORE_CLIP),
    Mode(name="`zero_grad(set_to_none=False)`", train=zeroed_in_place, reads=ONCE, micro_batches=2),
    *(scaled_mode(kind, clip) for kind in OPTIMIZERS for clip in CLIPS),
    Mode(
        name="closure: LBFGS",
        train=functools.partial(
            closure, make=lambda model: torch.optim.LBFGS(model.parameters(), max_iter=4)
        ),
        reads="the gradient at the start of the step: that of the first evaluation",
    ),
    Mode(
        name="closure: `AdamW.step(closure)`",
        train=functools.partial(closure, make=adamw),
        reads="the gradient that the closure left",
        remarks="what Lightning's automatic optimization does",
    ),
]
