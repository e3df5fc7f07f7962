"""The small language model that the modes train, and its data.

Width 7 and 12 make uneven shards on 2 and 4 ranks, `scale`, of one row, makes empty ones. Tokens 7 to 10 never
occur, so the embedding's gradient has rows of exact zeros.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

NUM_TOKENS = 11
NUM_USED_TOKENS = 7


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, 7)
        self.norm = nn.LayerNorm(7)
        self.first = nn.Linear(7, 12)
        self.second = nn.Linear(12, 7)
        self.scale = nn.Parameter(torch.ones(1, 7))
        self.head = nn.Linear(7, NUM_TOKENS, bias=False)

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens))
        hidden = self.second(torch.tanh(self.first(hidden)))
        return self.head(hidden * self.scale)


def make_net():
    """The same weights every time."""
    torch.manual_seed(0)
    return Net()


def batch(step, rank=0, micro_batch=0):
    """Tokens of one micro-batch, int64 of shape (4, 5)."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro_batch)
    return torch.randint(0, NUM_USED_TOKENS, (4, 5), generator=generator)


def loss_of(model, step, rank=0, micro_batch=0):
    """Mean loss of one micro-batch (all have equal size, so means of means are means)."""
    tokens = batch(step, rank, micro_batch)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


class WithUnused(Net):
    """`sometimes` takes part in step 2 only, `never` in none."""

    def __init__(self):
        super().__init__()
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(2, 2)

    def forward(self, tokens, *, all_of_it=False):
        hidden = self.norm(self.embedding(tokens))
        if all_of_it:
            hidden = hidden + self.sometimes(hidden)
        hidden = self.second(torch.tanh(self.first(hidden)))
        return self.head(hidden * self.scale)


def make_with_unused():
    torch.manual_seed(3)
    return WithUnused()


def loss_of_part(model, step):
    return loss_of(functools.partial(model, all_of_it=step == 2), step)


def gradients_of_part(step, weights):
    model = make_with_unused()
    model.load_state_dict(weights)
    loss_of_part(model, step).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
