"""Plays right and wrong loops under DDP, FSDP2 and FSDP1, one run each, and says where each run was recorded.

Started by torchrun from `test_checks_ranks.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradiometer as gm
from tests.integration.capture_ranks import wrap_fsdp1

STEPS = 52
LOOPS = (
    "right",
    "zeros kept",
    "no zero_grad",
    "divided",
    "divided without sync",
    "not divided",
    "numbers only",
)


class Net(nn.Module):
    """Names its parts as `wrap_fsdp2` of the other program expects."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def wrapped(kind, world_size):
    torch.manual_seed(0)
    model = Net()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "ddp, bucket views":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == "fsdp1":
        return wrap_fsdp1(model, world_size)[0]
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first)
    return fully_shard(model)


def without_sync(model, *, wanted):
    if not wanted:
        return contextlib.nullcontext()
    if hasattr(model, "no_sync"):
        return model.no_sync()
    return unsynchronised(model)


@contextlib.contextmanager
def unsynchronised(model):
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def play(run, model, loop):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.watch(model, optimizer)
    count = 3 if "divided" in loop else 1
    for _ in range(STEPS):
        for index in range(count):
            with without_sync(model, wanted="without sync" in loop and index < count - 1):
                loss = nn.functional.mse_loss(model(torch.randn(6, 8)), torch.randn(6, 4))
                run.log({"train/loss": loss if loop != "numbers only" else loss.item()})
                (loss if loop == "not divided" else loss / count).backward()
        optimizer.step()
        if loop != "no zero_grad":
            optimizer.zero_grad(set_to_none=loop != "zeros kept")


def main():
    out = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    said = {}
    for kind in ("ddp", "ddp, bucket views", "fsdp2", "fsdp1"):
        for loop in LOOPS:
            with gm.init(mode="offline", name=f"{kind}: {loop}") as run:
                play(run, wrapped(kind, dist.get_world_size()), loop)
                said[f"{kind}: {loop}"] = str(run.directory)
            assert run.failures == {}, run.failures
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
