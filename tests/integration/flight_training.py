"""A small training in which one layer overflows, and how `gradiometer replay` builds its model again."""

from __future__ import annotations

import torch
from torch import nn

import gradiometer as gm

STEPS, BAD_STEP = 20, 12


class Sharpen(nn.Module):
    """Overflows in float32 as soon as an input exceeds 88; written as people write it."""

    def forward(self, x):
        scores = torch.exp(x)
        return scores / scores.sum(dim=-1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.drop = nn.Dropout(0.25)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.sharpen = Sharpen()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.drop(self.embed(x))
        return self.head(self.sharpen(hidden + self.body(hidden)))


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator)
    if step == BAD_STEP:
        x[3] *= 400.0  # one sample that was never normalised
    return {"x": x, "y": torch.randint(0, 3, (8,), generator=generator)}


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def train(run, *, record=True, before_step=lambda step, model, optimizer: None, steps=STEPS):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.watch(model, optimizer)
    for step in range(1, steps + 1):
        batch = batch_of(step)
        if record:
            run.record_batch(batch)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        before_step(step, model, optimizer)
        optimizer.step()
        run.log({"train/loss": loss})
    return model, optimizer


def build(_batch):
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_of


def build_without_overflow(batch):
    model, _, step = build(batch)
    model.sharpen = nn.Softmax(dim=-1)
    return model, None, step


def build_from_forward(_batch):
    def step(model, seen):
        return model(*seen["args"], **seen["kwargs"]).logsumexp(-1).sum()

    return Net(), None, step


def build_another(_batch):
    return nn.Linear(4, 4), None, loss_of


def build_nothing(_batch):
    return None


if __name__ == "__main__":
    with gm.init(flight_recorder=True) as opened:
        train(opened)
