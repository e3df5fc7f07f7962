"""Modes of one process: what a model may look like, and its gradients."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.integration.modes.loop_modes import BAD_STEP, ONCE, STEPS, adamw, train
from tests.integration.modes.mode_framework import Mode, outcome, weights_of
from tests.integration.modes.mode_net import Net, loss_of, make_net, make_with_unused


class Checkpointed(Net):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens))
        hidden = checkpoint(lambda x: torch.tanh(self.first(x)), hidden, use_reentrant=self.use_reentrant)
        hidden = checkpoint(self.second, hidden, use_reentrant=self.use_reentrant)
        return self.head(hidden * self.scale)


def checkpointed(session, *, use_reentrant):
    torch.manual_seed(0)
    model = Checkpointed(use_reentrant)
    return train(session, model, adamw(model), micro_batches=2)


def checkpoint_wrapped(session):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = make_net()
    model.first, model.second = checkpoint_wrapper(model.first), checkpoint_wrapper(model.second)
    optimizer = adamw(model)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, optimizer)


def make_tied():
    model = make_net()
    model.head.weight = model.embedding.weight
    return model


def tied(session):
    model = make_tied()
    return train(session, model, adamw(model))


def make_frozen():
    model = make_with_unused()
    model.first.requires_grad_(False)
    return model


def gradients_of_frozen(step, weights, *, until=STEPS):
    model = make_frozen()
    model.load_state_dict(weights)
    model.first.requires_grad_(step > until)
    loss_of(model, step).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def frozen(session):
    model = make_frozen()
    return train(session, model, adamw(model))


def unfrozen(session):
    model = make_frozen()

    def unfreeze(step):
        if step == 1:
            model.first.requires_grad_(True)

    return train(session, model, adamw(model), after_step=unfreeze)


def group_added(session):
    model = make_net()
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "first" not in n], lr=1e-2)

    def add(step):
        if step == 1:
            # Otherwise the gradients of the step before would still be there.
            model.first.zero_grad()
            optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 1e-3})

    return train(session, model, optimizer, after_step=add)


def gradients_of_groups(step, weights):
    gradients = Mode(name="", train=group_added, reads="").gradients(step, weights)
    return {name: value for name, value in gradients.items() if step > 1 or "first" not in name}


def make_sparse():
    torch.manual_seed(0)
    model = Net()
    model.embedding = nn.Embedding.from_pretrained(model.embedding.weight.detach(), freeze=False, sparse=True)
    return model


def sparse(session):
    model = make_sparse()
    rest = [p for name, p in model.named_parameters() if name != "embedding.weight"]
    optimizers = [torch.optim.SparseAdam([model.embedding.weight], lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
    session.watch(model, optimizers)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        for micro_batch in range(2):
            (loss_of(model, step, 0, micro_batch) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return outcome(model, *optimizers)


def half(session, *, dtype):
    model = make_net().to(dtype)
    return train(session, model, torch.optim.SGD(model.parameters(), lr=1e-2), micro_batches=2)


def make_half(dtype):
    return make_net().to(dtype)


def autocast(session):
    model = make_net()
    optimizer = adamw(model)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        autocast_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, optimizer)


def autocast_loss(model, step):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, step)


def gradients_of_autocast(step, weights):
    model = make_net()
    model.load_state_dict(weights)
    autocast_loss(model, step).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def no_backward(session, *, set_to_none):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        if step != BAD_STEP:
            loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return outcome(model, optimizer)


def gradients_without_backward(step, weights, *, set_to_none):
    gradients = Mode(name="", train=no_backward, reads="").gradients(step, weights)
    if step != BAD_STEP:
        return gradients
    return {name: None if set_to_none else torch.zeros_like(value) for name, value in gradients.items()}


MODES = [
    Mode(
        name="activation checkpointing, reentrant",
        train=functools.partial(checkpointed, use_reentrant=True),
        reads=ONCE,
        micro_batches=2,
    ),
    Mode(
        name="activation checkpointing, not reentrant",
        train=functools.partial(checkpointed, use_reentrant=False),
        reads=ONCE,
        micro_batches=2,
    ),
    Mode(
        name="activation checkpointing by `checkpoint_wrapper`",
        train=checkpoint_wrapped,
        reads=ONCE,
        remarks="layer names without `_checkpoint_wrapped_module`",
    ),
    Mode(
        name="tied weights",
        train=tied,
        reads=ONCE,
        make=make_tied,
        remarks="one layer, under the first of its names",
    ),
    Mode(
        name="frozen and unused parameters",
        train=frozen,
        reads=ONCE,
        reference=gradients_of_frozen,
        remarks="they are shown as having no gradient, not as 0",
    ),
    Mode(
        name="a parameter unfrozen in the run",
        train=unfrozen,
        reads=ONCE,
        reference=functools.partial(gradients_of_frozen, until=1),
    ),
    Mode(
        name="a parameter group added in the run",
        train=group_added,
        reads=ONCE,
        reference=gradients_of_groups,
    ),
    Mode(
        name="sparse embedding gradients",
        train=sparse,
        reads=ONCE,
        make=make_sparse,
        micro_batches=2,
        remarks="its implicit zeros are counted as zeros; on a GPU not collected, with the reason",
    ),
    Mode(
        name="float16 gradients",
        train=functools.partial(half, dtype=torch.float16),
        reads=f"{ONCE}, summed in float32 or wider",
        make=functools.partial(make_half, torch.float16),
        micro_batches=2,
    ),
    Mode(
        name="bfloat16 gradients",
        train=functools.partial(half, dtype=torch.bfloat16),
        reads=f"{ONCE}, summed in float32 or wider",
        make=functools.partial(make_half, torch.bfloat16),
        micro_batches=2,
    ),
    Mode(name="autocast to bfloat16", train=autocast, reads=ONCE, reference=gradients_of_autocast),
    Mode(
        name="step without backward, gradients None",
        train=functools.partial(no_backward, set_to_none=True),
        reads=ONCE,
        reference=functools.partial(gradients_without_backward, set_to_none=True),
        remarks="no gradient, not a gradient of 0",
    ),
    Mode(
        name="step without backward, gradients zeroed in place",
        train=functools.partial(no_backward, set_to_none=False),
        reads=ONCE,
        reference=functools.partial(gradients_without_backward, set_to_none=False),
        remarks="the zeros that the optimizer really got",
    ),
]
