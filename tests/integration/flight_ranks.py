"""A training of several ranks in which rank 1 alone gets a batch that overflows. Started by torchrun."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradiometer as gm
from tests.integration import flight_training
from tests.integration.flight_training import Net, loss_of

STEPS, BAD_STEP, BAD_RANK = 30, 26, 1


def batch_of(rank, step):
    batch = flight_training.batch_of(100 * step + rank)
    if (rank, step) == (BAD_RANK, BAD_STEP):
        batch["x"][3] *= 400.0
    return batch


def wrap(kind, model, world_size):
    if kind in ("ddp", "broken"):
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.body, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    kind, folder, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    run = gm.init(flight_recorder=folder)
    torch.manual_seed(0)
    model = wrap(kind, Net(), world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.watch(model, optimizer)
    if kind == "broken" and rank == BAD_RANK:
        break_recorder()
    reference = Net()
    saved = None
    for step in range(1, STEPS + 1):
        batch = batch_of(rank, step)
        run.record_batch(batch)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if step == BAD_STEP and kind != "fsdp1":
            saved = [whole(parameter).tolist() for parameter in model.parameters()]
        optimizer.step()
        run.log({"train/loss": loss})
    run.finish()
    names = [name for name, _ in reference.named_parameters()]
    said = {"failures": run.failures, "weights": dict(zip(names, saved, strict=True)) if saved else None}
    (out / f"rank{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def break_recorder():
    """On this rank alone the recorder cannot look at the gradients."""
    from gradiometer.capture import flight_recorder

    def fail(_parameters):
        raise MemoryError("no room to look")

    flight_recorder._all_finite = fail


def whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()


if __name__ == "__main__":
    main()
