"""Modes with torch.compile in one process. The number of compiled graphs and of graph breaks goes into the notes."""

from __future__ import annotations

import functools

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.integration.modes.loop_modes import ONCE
from tests.integration.modes.mode_framework import Mode, Session, outcome, weights_of
from tests.integration.modes.mode_net import loss_of, make_net

STEPS = 3
CLIP = 0.05


def train(session: Session, model, plain, optimizer, *, watch_after=0, step_optimizer=None):
    """Steps before the watch exist without the agent too, and are not counted."""
    for step in range(1, watch_after + 1):
        loss_of(model, 100 + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(plain))
        loss_of(model, step).backward()
        (step_optimizer or optimizer.step)()
        optimizer.zero_grad()
    return outcome(plain, optimizer)


def counted(session, backend):
    """A backend that counts graphs, in a fresh compiler."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = CompileCounterWithBackend(backend)
    session.notes["counter"] = counter
    return counter


def finish(session, tensors):
    counter = session.notes.pop("counter")
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    session.notes |= {"graphs": counter.frame_count, "ops": counter.op_count, "graph_breaks": breaks}
    return tensors


def compiled(session, *, backend, watch_after, in_place=False):
    counter = counted(session, backend)
    plain = make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if in_place:
        plain.compile(backend=counter)
        model = plain
    else:
        model = torch.compile(plain, backend=counter)
    return finish(session, train(session, model, plain, optimizer, watch_after=watch_after))


def compiled_later(session):
    """`torch.compile` of a model that is watched already: the forward probe's hooks are on it when it is traced."""
    counter = counted(session, "eager")
    plain = make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    session.watch(plain, optimizer)
    model = torch.compile(plain, backend=counter)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(plain))
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return finish(session, outcome(plain, optimizer))


def compiled_optimizer(session):
    counter = counted(session, "eager")
    plain = make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=True)
    model = torch.compile(plain, backend=counter)
    step = torch.compile(optimizer.step, backend=counter)
    return finish(session, train(session, model, plain, optimizer, step_optimizer=step))


def compiled_step(session):
    """Forward, backward, clip and optimizer step in one compiled function."""
    counter = counted(session, "eager")
    plain = make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    session.watch(plain, optimizer)

    def step_once(step):
        loss_of(plain, step).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(step_once, backend=counter)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(plain))
        compiled(step)
    return finish(session, outcome(plain, optimizer))


def clipped_gradients(step, weights):
    model = make_net()
    model.load_state_dict(weights)
    loss_of(model, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def mode(name, train, remarks=""):
    return Mode(
        name=f"torch.compile, {name}",
        train=train,
        reads=ONCE,
        unavailable=("nonfinite_activation",),
        remarks=remarks,
    )


MODES = [
    mode(
        "backend eager, watched before the first compiled step",
        functools.partial(compiled, backend="eager", watch_after=0),
        "as many graphs as without the agent, no more graph breaks; no search for the first non-finite output",
    ),
    mode(
        "backend eager, watched after the first compiled step",
        functools.partial(compiled, backend="eager", watch_after=2),
    ),
    mode(
        "backend aot_eager, watched before the first compiled step",
        functools.partial(compiled, backend="aot_eager", watch_after=0),
    ),
    mode(
        "backend aot_eager, watched after the first compiled step",
        functools.partial(compiled, backend="aot_eager", watch_after=2),
    ),
    mode("`model.compile()`", functools.partial(compiled, backend="eager", watch_after=0, in_place=True)),
    Mode(
        name="torch.compile of a model that is watched already",
        train=compiled_later,
        reads=ONCE,
        remarks="the first non-finite output is looked for only where a part of the model runs uncompiled",
    ),
    mode("with a compiled `optimizer.step`", compiled_optimizer),
    Mode(
        name="torch.compile of a whole step, with its clip",
        train=compiled_step,
        reads="the gradient after clipping",
        reference=clipped_gradients,
        unavailable=("grad/clip_norm",),
        remarks="said on the run; to look on before the clip would break its graph",
    ),
]
