"""Modes of one process: accumulation, clipping, loss scaling, closures, what a model may look like."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.integration.modes.mode_framework import Mode, Session, outcome, weights_of
from tests.integration.modes.mode_net import Net, loss_of, make_net

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


class WithUnused(Net):
    """`sometimes` takes part in step 2 only, `never` in none."""

    def __init__(self):
        super().__init__()
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(2, 2)

    def forward(self, tokens, *, all_of_it=False):
        hidden = self.norm(self.embedding(tokens))
        if all_of_it:
            hidden = hidden + self.sometimes(hidden)
        hidden = self.second(torch.tanh(self.first(hidden)))
        return self.head(hidden * self.scale)


def make_with_unused():
    torch.manual_seed(3)
    return WithUnused()


def loss_of_part(model, step):
    return loss_of(functools.partial(model, all_of_it=step == 2), step)


def gradients_of_part(step, weights):
    model = make_with_unused()
    model.load_state_dict(weights)
    loss_of_part(model, step).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


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


# -- models ---------------------------------------------------------------------------------------------------------


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


PER_PARAMETER = "each gradient when its own optimizer steps: per parameter, pre-clip"
WATCH_LIST = "`watch(model, [first, second])`: the step is complete when both have stepped"

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
