"""FSDP2 on any number of processes, on GPUs or on the CPU: `torchrun --nproc_per_node=2 examples/fsdp2_torchrun.py`.

Every rank opens the same run and reports its own shards; the server adds them up, so the norm on the page is that of
the whole gradient, and the training needs no collective for it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradiometer as gm

WIDTH, VOCABULARY, LENGTH = 64, 128, 32
MICRO_BATCHES = 2
STEPS = 100


class Block(nn.Module):
    """Mixes each position with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(2 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        before = nn.functional.pad(normed, (0, 0, 1, 0))[:, :-1]
        return hidden + self.feed(torch.cat([normed, before], dim=-1))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        # The loss is computed in float32.
        return self.head(hidden).float()


def make_batch(device: str) -> torch.Tensor:
    """Sequences that count up from a random start, to be learned quickly; int64 of shape (8, LENGTH + 1)."""
    starts = torch.randint(VOCABULARY, (8, 1), device=device)
    return (starts + torch.arange(LENGTH + 1, device=device)) % VOCABULARY


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(dist.get_rank())

    model = LanguageModel().to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # On every rank, after the process group is there and the model is sharded.
    with gm.init(project="examples", name="fsdp2", config={"ranks": dist.get_world_size()}) as run:
        run.watch(model, optimizer)
        for _ in range(STEPS):
            for micro_batch in range(MICRO_BATCHES):
                model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
                tokens = make_batch(device)
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / MICRO_BATCHES).backward()
            # Each rank logs its own loss; the page shows the mean, and every rank's where they differ.
            run.log({"train/loss": loss})
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
