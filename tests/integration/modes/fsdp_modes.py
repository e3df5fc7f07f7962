"""FSDP1 and FSDP2 on two ranks: every rank holds a part of each parameter, or none of a small one."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.integration.modes.ddp_modes import CLIP, STEPS, frozen_reference, make_frozen_net
from tests.integration.modes.mode_framework import Mode
from tests.integration.modes.mode_net import Net, loss_of, make_net
from tests.integration.modes.sharded_weights import gathered, local_outcome, mesh, of_fsdp1

READS = "the reduced gradient's local shard, once per optimizer step; shards add up"
READS_CLIPPED = "the reduced gradient's local shard before clipping; shards add up"


# -- FSDP2 -----------------------------------------------------------------------------------------------------


def sharded(net, **options):
    """`fully_shard` on one block and the rest, over all ranks unless told otherwise."""
    options.setdefault("mesh", mesh(dist.get_world_size()))
    fully_shard(net.first, **options)
    return fully_shard(net, **options)


def fsdp2(session, net, *, micro_batches=1, clip=False, data_rank=None, **options):
    model = sharded(net, **options)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    session.watch(model, optimizer)
    data_rank = session.rank if data_rank is None else data_rank
    for step in range(1, STEPS + 1):
        session.begin_step(gathered(model))
        for micro_batch in range(micro_batches):
            model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
            loss = loss_of(model, step, data_rank, micro_batch)
            (loss / micro_batches).backward()
        session.log({"train/loss": loss})
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


def compiled_block(session):
    net = make_net()
    net.first.compile(backend="eager")
    return fsdp2(session, net)


def scaled(session):
    """torch's plain GradScaler; the optimizer is not fused."""
    model = sharded(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    session.watch(model, optimizer, scaler)
    for step in range(1, STEPS + 1):
        session.begin_step(gathered(model))
        scaler.scale(loss_of(model, step, session.rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


def low_precision_reference(step, weights, *, reduce_dtype):
    """Both ranks compute in bfloat16; what they sum is of `reduce_dtype`, what the optimizer gets is float32."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(2):
        model = make_net()
        model.load_state_dict(weights)
        model.to(torch.bfloat16)
        loss_of(model, step, rank).backward()
        for name, parameter in model.named_parameters():
            # Halves are exact in bfloat16, so it does not matter that FSDP divides after the sum.
            share = parameter.grad.to(reduce_dtype) / 2
            total[name] = share if name not in total else total[name] + share
    return {name: gradient.float() for name, gradient in total.items()}


class TiedNet(Net):
    """The head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight


def make_tied_net():
    torch.manual_seed(0)
    return TiedNet()


def mixed(session):
    """FSDP2 for a block, DDP for the head, the rest replicated by hand: torch's clipping raises."""
    net = make_net()
    fully_shard(net.first, mesh=mesh(2))
    net.head = DistributedDataParallel(net.head)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    session.watch(net, optimizer)
    by_hand = [p for n, p in net.named_parameters() if not n.startswith(("first", "head"))]
    for step in range(1, STEPS + 1):
        session.begin_step(gathered(net, "module."))
        loss_of(net, step, session.rank).backward()
        for parameter in by_hand:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        try:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        except RuntimeError as error:
            session.notes["clip"] = str(error)
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(net, optimizer)


# -- FSDP1 -----------------------------------------------------------------------------------------------------


def fsdp1(session, net, *, micro_batches=1, clip=False, clip_own_shard=False, units=(nn.Linear,), **options):
    model = FullyShardedDataParallel(
        net,
        auto_wrap_policy=ModuleWrapPolicy(set(units)),
        device_id=torch.device("cpu"),
        **options,
    )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(of_fsdp1(model))
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = loss_of(model, step, session.rank, micro_batch)
                (loss / micro_batches).backward()
        session.log({"train/loss": loss})
        if clip:
            model.clip_grad_norm_(CLIP)
        if clip_own_shard:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return local_outcome(model, optimizer)


def fsdp1_tied(session):
    """Without units inside: FSDP1 cannot tie weights across two of them."""
    return fsdp1(session, make_tied_net(), use_orig_params=False, units=())


FULL, GRAD_OP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
FLAT = "a flat parameter is split into its originals, so layers have their names"

MODES = [
    Mode(
        name="FSDP1 FULL_SHARD, use_orig_params, clipped",
        train=lambda s: fsdp1(s, make_net(), use_orig_params=True, sharding_strategy=FULL, clip=True),
        reads=READS_CLIPPED,
        world_size=2,
    ),
    Mode(
        name="FSDP1 SHARD_GRAD_OP, use_orig_params, accumulation under no_sync",
        train=lambda s: fsdp1(
            s, make_net(), use_orig_params=True, sharding_strategy=GRAD_OP, micro_batches=2
        ),
        reads=READS,
        micro_batches=2,
        world_size=2,
    ),
    Mode(
        name="FSDP1 NO_SHARD, use_orig_params, clipped",
        train=lambda s: fsdp1(s, make_net(), use_orig_params=True, sharding_strategy=NONE, clip=True),
        reads="the reduced gradient before clipping; replicas count once",
        world_size=2,
    ),
    Mode(
        name="FSDP1 FULL_SHARD, flat parameters, clipped",
        train=lambda s: fsdp1(s, make_net(), use_orig_params=False, sharding_strategy=FULL, clip=True),
        reads=READS_CLIPPED,
        remarks=FLAT,
        world_size=2,
    ),
    Mode(
        name="FSDP1 SHARD_GRAD_OP, flat parameters, accumulation under no_sync",
        train=lambda s: fsdp1(
            s, make_net(), use_orig_params=False, sharding_strategy=GRAD_OP, micro_batches=2
        ),
        reads=READS,
        remarks=FLAT,
        micro_batches=2,
        world_size=2,
    ),
    Mode(
        name="FSDP1 NO_SHARD, flat parameters",
        train=lambda s: fsdp1(s, make_net(), use_orig_params=False, sharding_strategy=NONE),
        reads="the reduced gradient; replicas count once",
        remarks=FLAT,
        world_size=2,
    ),
    Mode(
        name="FSDP1, tied weights, flat parameters",
        train=fsdp1_tied,
        reads=READS,
        remarks="tied weights are one layer, under the first name",
        make=make_tied_net,
        world_size=2,
    ),
    Mode(
        name="FSDP1, clipped by torch.nn.utils.clip_grad_norm_",
        train=lambda s: fsdp1(s, make_net(), use_orig_params=True, clip_own_shard=True),
        reads=READS_CLIPPED,
        remarks="this clips every rank by the norm of its own shard: grad/clip_norm is not collected, with the reason",
        unavailable=("grad/clip_norm",),
        world_size=2,
    ),
    Mode(
        name="FSDP2, clipped",
        train=lambda s: fsdp2(s, make_net(), clip=True),
        reads=READS_CLIPPED,
        world_size=2,
    ),
    Mode(
        name="FSDP2, accumulation without gradient sync, clipped",
        train=lambda s: fsdp2(s, make_net(), micro_batches=2, clip=True),
        reads="the accumulated and reduced gradient's local shard before clipping; shards add up",
        micro_batches=2,
        world_size=2,
    ),
    Mode(name="FSDP2", train=lambda s: fsdp2(s, make_net()), reads=READS, world_size=2),
    Mode(
        name="FSDP2, bfloat16 parameters and reduction",
        train=lambda s: fsdp2(s, make_net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        reads=READS,
        remarks="the reference computes in bfloat16 too",
        reference=functools.partial(low_precision_reference, reduce_dtype=torch.bfloat16),
        world_size=2,
    ),
    Mode(
        name="FSDP2, bfloat16 parameters, float32 reduction",
        train=lambda s: fsdp2(
            s,
            make_net(),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        ),
        reads=READS,
        remarks="the reference computes in bfloat16 too",
        reference=functools.partial(low_precision_reference, reduce_dtype=torch.float32),
        world_size=2,
    ),
    Mode(
        name="FSDP2, GradScaler",
        train=scaled,
        reads="the reduced gradient's local shard, once per optimizer step, unscaled; shards add up",
        world_size=2,
    ),
    Mode(name="FSDP2, a compiled block", train=compiled_block, reads=READS, world_size=2),
    Mode(
        name="FSDP2, CPU offload",
        train=lambda s: fsdp2(s, make_net(), offload_policy=CPUOffloadPolicy(pin_memory=False), clip=True),
        reads=READS_CLIPPED,
        world_size=2,
    ),
    Mode(
        name="FSDP2, tied weights",
        train=lambda s: fsdp2(s, make_tied_net()),
        reads=READS,
        remarks="tied weights are one layer, under the first name",
        make=make_tied_net,
        world_size=2,
    ),
    Mode(
        name="FSDP2, frozen parameters",
        train=lambda s: fsdp2(s, make_frozen_net()),
        reads=READS,
        remarks="a parameter that is in no optimizer is no layer",
        reference=frozen_reference,
        world_size=2,
    ),
    Mode(
        name="FSDP2 block and DDP head in one model",
        train=mixed,
        reads=READS,
        remarks="torch's clip_grad_norm_ raises for such a model; the statistics do not depend on it",
        world_size=2,
    ),
]
