"""Trains one small model for two steps on every rank, under the wrapper named on the command line.

Started by torchrun from `test_capture_distributed.py`, which reads the spools of all ranks afterwards.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradiometer as gm

STEPS = 2
CLIP = 0.05


class Net(nn.Module):
    """Width 7 makes uneven shards; `scale`, of one row, makes an empty one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.first = nn.Linear(7, 10)
        self.second = nn.Linear(10, 7)
        self.scale = nn.Parameter(torch.ones(1, 7))
        self.head = nn.Linear(7, 11, bias=False)

    def forward(self, tokens):
        hidden = self.second(torch.relu(self.first(self.embedding(tokens))))
        return self.head(hidden * self.scale)


def make():
    torch.manual_seed(0)
    return Net()


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    # Tokens 7 to 10 never occur: rows of zeros in the embedding's gradient.
    tokens = torch.randint(0, 7, (4, 5), generator=generator)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def wrap_ddp(model, _world_size):
    return nn.parallel.DistributedDataParallel(model), nn.utils.clip_grad_norm_


def wrap_fsdp2(model, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, nn.utils.clip_grad_norm_


def wrap_fsdp1(model, _world_size):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    wrapped = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    return wrapped, lambda _parameters, limit: wrapped.clip_grad_norm_(limit)


def main():
    kind, out = sys.argv[1], Path(sys.argv[2])
    before = None
    if kind == "before":
        before = gm.init(mode="offline")
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = before or gm.init(mode="offline")
    model, clip = {
        "before": wrap_ddp,
        "fsdp2": wrap_fsdp2,
    }[kind](make(), world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        loss = loss_of(model, rank, step)
        loss.backward()
        if step == 2:
            clip(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        run.log({"train/loss": loss})
    directory = str(run.directory)
    run.finish()
    # Whatever ends this process from here on is not ours; if it aborts, it says where.
    faulthandler.enable()
    said = {"run_id": run.id, "directory": directory, "failures": run.failures, "dropped": run.dropped}
    said["threads"] = [thread.name for thread in threading.enumerate()]
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
