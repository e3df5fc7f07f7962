"""Trains one small model on every rank until a value goes bad on rank 1 alone. Started by torchrun.

`gradient`: FSDP2; at step BAD_STEP rank 1's own shards of two layers get a NaN, as from a broken memory or link.
`loss`: DDP; at step BAD_STEP rank 1's batch makes its loss NaN, which the all-reduce carries to everybody.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradiometer as gm

STEPS = {"gradient": 310, "loss": 40}
BAD_STEP = {"gradient": 290, "loss": 30}
BAD_RANK = 1
BAD_LAYERS = ("body.0.weight", "body.2.weight")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


def wrap(kind, model, world_size):
    if kind == "loss":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.body, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model, rank, step, *, bad):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 16, (4, 6), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
    return loss * math.nan if bad else loss


def corrupt(model):
    for name, parameter in model.named_parameters():
        if name in BAD_LAYERS:
            parameter.grad._local_tensor.view(-1)[3] = math.nan


def local_norms(model):
    return {
        name: parameter.grad._local_tensor.double().square().sum().sqrt().item()
        for name, parameter in model.named_parameters()
    }


def main():
    kind, out = sys.argv[1], Path(sys.argv[2])
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = gm.init()
    torch.manual_seed(0)
    model = wrap(kind, Net(), world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.watch(model, optimizer, statistics="full")
    norms = {}
    for step in range(1, STEPS[kind] + 1):
        now = step == BAD_STEP[kind] and rank == BAD_RANK
        loss = loss_of(model, rank, step, bad=now and kind == "loss")
        loss.backward()
        if now and kind == "gradient":
            corrupt(model)
        if kind == "gradient" and step < BAD_STEP[kind]:
            norms[step] = local_norms(model)
        optimizer.step()
        optimizer.zero_grad()
        run.log({"train/loss": loss})
    run.finish()
    said = {"run_id": run.id, "failures": run.failures, "dropped": run.dropped, "norms": norms}
    (out / f"rank{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
