"""DistributedDataParallel on two ranks: replicas, whose gradients are reduced into equal ones."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.integration.modes.mode_framework import Mode
from tests.integration.modes.mode_net import Net, loss_of, make_net
from tests.integration.modes.sharded_weights import gathered, local_outcome

READS = "the reduced gradient, once per optimizer step; replicas count once"
STEPS = 3
CLIP = 0.05


def train(session, net, *, ddp=None, micro_batches=1, clip=False, make_optimizer=None, compile_=False):
    """A data-parallel loop; with accumulation all but the last micro-batch run under `no_sync`."""
    model = DistributedDataParallel(torch.compile(net, backend="eager") if compile_ else net, **(ddp or {}))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    make_optimizer = make_optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    optimizer = make_optimizer(trainable)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(gathered(net))
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = loss_of(model, step, session.rank, micro_batch)
                (loss / micro_batches).backward()
        session.log({"train/loss": loss})
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


class BranchNet(Net):
    """`odd` is used on odd ranks only, `never` nowhere."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)
        self.rank = 0

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens))
        if self.rank % 2:
            hidden = hidden + self.odd(hidden)
        hidden = self.second(torch.tanh(self.first(hidden)))
        return self.head(hidden * self.scale)


def make_branch_net():
    torch.manual_seed(0)
    return BranchNet()


def branch_reference(step, weights):
    model = make_branch_net()
    model.load_state_dict(weights)
    for rank in range(2):
        model.rank = rank
        (loss_of(model, step, rank) / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def unused(session):
    net = make_branch_net()
    net.rank = session.rank
    return train(session, net, ddp={"find_unused_parameters": True})


def make_sparse_net():
    torch.manual_seed(0)
    net = Net()
    net.embedding = nn.Embedding.from_pretrained(net.embedding.weight.detach(), freeze=False, sparse=True)
    return net


def sparse(session):
    return train(
        session,
        make_sparse_net(),
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    )


def make_frozen_net():
    net = make_net()
    net.embedding.requires_grad_(requires_grad=False)
    net.first.bias.requires_grad_(requires_grad=False)
    return net


def frozen_reference(step, weights):
    """Frozen parameters are in no optimizer, and so no layers."""
    model = make_frozen_net()
    model.load_state_dict(weights)
    for rank in range(2):
        (loss_of(model, step, rank) / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


MODES = [
    Mode(name="DDP", train=lambda s: train(s, make_net()), reads=READS, world_size=2),
    Mode(
        name="DDP, gradient_as_bucket_view, clipped",
        train=lambda s: train(s, make_net(), ddp={"gradient_as_bucket_view": True}, clip=True),
        reads="the reduced gradient before clipping, once per optimizer step; replicas count once",
        world_size=2,
    ),
    Mode(
        name="DDP, accumulation under no_sync, clipped",
        train=lambda s: train(s, make_net(), micro_batches=2, clip=True),
        reads="the accumulated and reduced gradient before clipping; replicas count once",
        micro_batches=2,
        world_size=2,
    ),
    Mode(
        name="DDP, gradient_as_bucket_view, accumulation under no_sync",
        train=lambda s: train(s, make_net(), ddp={"gradient_as_bucket_view": True}, micro_batches=2),
        reads="the accumulated and reduced gradient; replicas count once",
        micro_batches=2,
        world_size=2,
    ),
    Mode(
        name="DDP, find_unused_parameters",
        train=unused,
        reads=READS,
        remarks="a parameter that no rank used has no gradient, and is shown so",
        reference=branch_reference,
        world_size=2,
    ),
    Mode(
        name="DDP, sparse embedding gradients",
        train=sparse,
        reads=READS,
        remarks="implicit zeros count as zeros",
        make=make_sparse_net,
        world_size=2,
    ),
    Mode(
        name="DDP, frozen parameters",
        train=lambda s: train(s, make_frozen_net()),
        reads=READS,
        remarks="a parameter that is in no optimizer is no layer",
        reference=frozen_reference,
        world_size=2,
    ),
    Mode(
        name="DDP of a compiled model",
        train=lambda s: train(s, make_net(), compile_=True),
        reads=READS,
        world_size=2,
    ),
]
