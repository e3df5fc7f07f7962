"""Trains a small FSDP2 model on every rank until it is told to stop, and remembers the full gradients' histograms.

Started by torchrun. Files in the given folder say what to do: `spoil`: rank 1's own shard gets a NaN in the next step;
`stop`: end. Rank 0 writes what it knows to `full.json`.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import gradiometer as gm

BAD_RANK = 1
BAD_LAYER = "body.2.weight"
STEP_S = 0.02
MAX_STEPS = 5000


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 7)
        self.body = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7))
        self.head = nn.Linear(7, 16)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.body, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def bins_of(full):
    """By the definition, of the full gradient: the exponent field of each float32."""
    values = full.detach().float().contiguous().view(-1).numpy()
    return np.bincount((values.view(np.uint32) >> 23) & 255, minlength=256).tolist()


def told(out):
    """What rank 0 reads in the folder, for all ranks to do in the same step."""
    wishes = torch.tensor([(out / "spoil").exists(), (out / "stop").exists()], dtype=torch.int32)
    dist.broadcast(wishes, 0)
    return bool(wishes[0]), bool(wishes[1])


def main():
    out = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    run = gm.init()
    torch.manual_seed(0)
    model = sharded(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    run.watch(model, optimizer)
    full, spoiled, spoiled_at = {}, False, None
    for step in range(1, MAX_STEPS):
        spoil, stop = told(out)
        if stop:
            break
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(0, 16, (4, 6), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
        if spoil and not spoiled:
            spoiled, spoiled_at = True, step
            if rank == BAD_RANK:
                dict(model.named_parameters())[BAD_LAYER].grad._local_tensor.view(-1)[3] = math.nan
        if step == 5:
            run.histograms("step five")
        full[step] = {name: bins_of(one.grad.full_tensor()) for name, one in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)
    run.finish()
    said = {"failures": run.failures, "dropped": run.dropped}
    (out / f"rank{rank}.json").write_text(json.dumps(said))
    if rank == 0:
        (out / "full.json").write_text(json.dumps({"bins": full, "spoiled_at": spoiled_at}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
