"""Ranks that hold different things: tensor parallelism, pipeline stages, experts. Two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.integration.modes.mode_framework import Mode
from tests.integration.modes.mode_net import NUM_TOKENS, batch, loss_of, make_net
from tests.integration.modes.sharded_weights import from_all_ranks, gathered, local_outcome, mesh

STEPS = 3
READS = "the local shard, once per optimizer step; shards add up, replicas count once"
PLAN = {"first": ColwiseParallel(), "second": RowwiseParallel()}
SEQUENCE_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0),
    "first": ColwiseParallel(input_layouts=Shard(0)),
    "second": RowwiseParallel(output_layouts=Replicate()),
}
"""Cuts the batch, which has an even size, as one would a sequence. The embedding's gradient is replicated although its
weight is sharded; those of the norm are Partial."""


# -- tensor parallelism ----------------------------------------------------------------------------------------


def tensor_parallel(session, plan, *, clip=False):
    """Both ranks have the same data."""
    model = parallelize_module(make_net(), mesh(2, names=("tensor",)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(gathered(model))
        loss_of(model, step).backward()
        if clip:
            try_to_clip(session, model)
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


def try_to_clip(session, model):
    """torch's clipping raises where parameters live on different meshes, or on none."""
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    except RuntimeError as error:
        session.notes["clip"] = str(error)


def without_norm(step, weights):
    """Partial gradients are not collected."""
    model = make_net()
    model.load_state_dict(weights)
    loss_of(model, step).backward()
    return {
        name: None if name.startswith("norm") else parameter.grad
        for name, parameter in model.named_parameters()
    }


# -- pipeline stages -------------------------------------------------------------------------------------------


class FirstStage(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.embedding, self.norm, self.first = net.embedding, net.norm, net.first

    def forward(self, tokens):
        return torch.tanh(self.first(self.norm(self.embedding(tokens))))


class LastStage(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.scale, self.second, self.head = net.scale, net.second, net.head

    def forward(self, hidden):
        return self.head(self.second(hidden) * self.scale)


def token_loss(logits, tokens):
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def pipeline(session):
    """GPipe with two micro-batches; each rank has an optimizer for its own stage."""
    model = (FirstStage, LastStage)[session.rank](make_net())
    stage = PipelineStage(model, session.rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=token_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(from_all_ranks(gathered(model)))
        tokens = batch(step)
        if session.rank == 0:
            schedule.step(tokens)
        else:
            losses = []
            schedule.step(target=tokens, losses=losses)
            session.log({"train/loss": torch.stack(losses).mean()})
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


# -- experts ---------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Tokens with an even number go to expert 0, the others to expert 1; `own`: the only one held here, or None."""

    def __init__(self, own=None):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        weights = torch.randn(2, 7, 7, generator=generator) / 3
        self.own = own
        self.group = None
        self.weight = nn.Parameter(weights if own is None else weights[own].clone())

    def forward(self, hidden, tokens):
        masks = [(tokens % 2 == expert).unsqueeze(-1) for expert in (0, 1)]
        if self.own is None:
            return sum(hidden @ self.weight[expert] * masks[expert] for expert in (0, 1))
        return torch.distributed.nn.functional.all_reduce(
            hidden @ self.weight * masks[self.own], group=self.group or dist.group.WORLD
        )


class ExpertNet(nn.Module):
    def __init__(self, own=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(NUM_TOKENS, 7)
        self.experts = Experts(own)
        self.head = nn.Linear(7, NUM_TOKENS)

    def forward(self, tokens):
        return self.head(self.experts(self.embedding(tokens), tokens))


def expert_parallel(session, *, told=True):
    """Expert parallelism by hand: plain tensors of one name and shape, with other values on each rank."""
    model = ExpertNet(own=session.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.watch(model, optimizer, sharded={"experts.*": dist.group.WORLD} if told else None)
    shared = [*model.embedding.parameters(), *model.head.parameters()]
    for step in range(1, STEPS + 1):
        weights = gathered(model)
        parts = [torch.empty_like(weights["experts.weight"]) for _ in range(2)]
        dist.all_gather(parts, weights["experts.weight"])
        session.begin_step(weights | {"experts.weight": torch.stack(parts)})
        # Both ranks compute the whole loss, and the backward pass of all_reduce adds up both of them.
        (loss_of(model, step) / 2).backward()
        for parameter in shared:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


MODES = [
    Mode(
        name="tensor parallelism",
        train=lambda s: tensor_parallel(s, PLAN, clip=True),
        reads=READS,
        remarks="torch's clip_grad_norm_ raises for such a model; the statistics do not depend on it",
        ranks=1,
        world_size=2,
    ),
    Mode(
        name="tensor and sequence parallelism",
        train=lambda s: tensor_parallel(s, SEQUENCE_PLAN),
        reads=READS,
        remarks="not collected: layers whose gradient is Partial (the norms), and so grad/norm",
        reference=without_norm,
        unavailable=("grad/layers", "grad/norm"),
        world_size=2,
    ),
    Mode(
        name="pipeline stages",
        train=pipeline,
        reads="each stage's accumulated gradient, once per optimizer step; stages add up",
        remarks="a norm that clipping returns is of one stage: it differs from rank to rank",
        ranks=1,
        world_size=2,
    ),
    Mode(
        name="expert parallelism, plain tensors",
        train=expert_parallel,
        reads=READS,
        remarks='the user says which: watch(..., sharded={"experts.*": group}); else an alert says that replicas differ',
        make=ExpertNet,
        ranks=1,
        world_size=2,
    ),
]


def same_names(session, *, name=None):
    """Two stages that are both built as `nn.Sequential`, so that their parameters have the same names."""
    torch.manual_seed(session.rank)
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    session.watch(model, optimizer, name=None if name is None else f"{name}{session.rank}")
    for _ in range(STEPS):
        model(torch.ones(2, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


UNTOLD_EXPERTS = Mode(
    name="expert parallelism without sharded",
    train=lambda s: expert_parallel(s, told=False),
    reads="",
    make=ExpertNet,
    ranks=1,
    world_size=2,
    replicas_identical=False,
)
SAME_NAMES = Mode(name="stages with the same names", train=same_names, reads="", world_size=2)
"""Mistakes, which must show: no rows of the table."""

OWN_NAMES = Mode(
    name="stages with names of their own", train=lambda s: same_names(s, name="stage"), reads="", world_size=2
)
"""What the alert advises."""
