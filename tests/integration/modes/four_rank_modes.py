"""Four ranks: what is sharded over one dimension of a mesh and replicated or sharded otherwise over the other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.integration.modes.fsdp_modes import fsdp1, fsdp2
from tests.integration.modes.mode_framework import Mode
from tests.integration.modes.mode_net import loss_of, make_net
from tests.integration.modes.parallel_modes import PLAN, ExpertNet, try_to_clip
from tests.integration.modes.sharded_weights import gathered, local_outcome, mesh

STEPS = 3
READS = "the reduced gradient's local shard, once per optimizer step; shards add up, replicas count once"
SAME_LOSS = 0.7
"""Logged by each rank of the first mode."""


def hybrid2(session):
    return fsdp2(session, make_net(), mesh=mesh(2, 2, names=("replica", "shard")), clip=True)


def hybrid1(session):
    return fsdp1(
        session,
        make_net(),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh(2, 2, names=("replica", "shard")),
        clip=True,
    )


def sharded_tensor_parallel(session):
    """FSDP2 over the data dimension of a model that is tensor-parallel over the other."""
    whole = mesh(2, 2)
    data = whole["data"]
    model = fully_shard(parallelize_module(make_net(), whole["tensor"], PLAN), mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(gathered(model))
        loss_of(model, step, data.get_local_rank()).backward()
        session.log({"train/same": SAME_LOSS})
        try_to_clip(session, model)
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


def experts_and_data(session):
    """Experts over one dimension, data over the other: replicas of each expert on two ranks."""
    whole = mesh(2, 2, names=("data", "expert"))
    model = ExpertNet(own=whole["expert"].get_local_rank())
    model.experts.group = whole["expert"].get_group()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.watch(model, optimizer, sharded={"experts.*": whole["expert"]})
    data = whole["data"]
    for step in range(1, STEPS + 1):
        weights = gathered(model)
        parts = [torch.empty_like(weights["experts.weight"]) for _ in range(2)]
        dist.all_gather(parts, weights["experts.weight"], group=whole["expert"].get_group())
        session.begin_step(weights | {"experts.weight": torch.stack(parts)})
        (loss_of(model, step, data.get_local_rank()) / 4).backward()
        for name, parameter in model.named_parameters():
            is_expert = name.startswith("experts")
            dist.all_reduce(parameter.grad, group=data.get_group() if is_expert else None)
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


MODES = [
    Mode(name="HSDP 2x2, FSDP2, clipped", train=hybrid2, reads=READS, world_size=4),
    Mode(name="HSDP 2x2, FSDP1, clipped", train=hybrid1, reads=READS, world_size=4),
    Mode(
        name="FSDP2 and tensor parallelism 2x2",
        train=sharded_tensor_parallel,
        reads=READS,
        remarks="torch's clip_grad_norm_ raises for such a model; the statistics do not depend on it",
        ranks=2,
        world_size=4,
    ),
    Mode(
        name="expert and data parallelism 2x2, plain tensors",
        train=experts_and_data,
        reads=READS,
        remarks='watch(..., sharded={"experts.*": group or mesh dimension})',
        make=ExpertNet,
        ranks=2,
        world_size=4,
    ),
]
