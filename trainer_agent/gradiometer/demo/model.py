"""A small transformer language model, written out in full so that a fault can be put into one real layer of it.

Shape letters: B batch, T context length, D width, H heads, E width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes: about 0.5 million parameters, which two CPU cores train at several steps per second."""

    vocabulary: int = 96
    context: int = 64
    width: int = 96
    heads: int = 4
    blocks: int = 4


def scaled_logits(query_BHTE: Tensor, key_BHTE: Tensor) -> Tensor:
    """Attention logits (B, H, T, T), divided by the square root of the head's width."""
    return query_BHTE @ key_BHTE.transpose(-2, -1) / math.sqrt(query_BHTE.shape[-1])


class Attention(nn.Module):
    """Causal self-attention. `logits` is how queries and keys are compared; a fault may replace it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.logits: Callable[[Tensor, Tensor], Tensor] = scaled_logits

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Mix each position with those before it; (B, T, D) in and out."""
        batch, context, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, context, 3, self.heads, width // self.heads)
        query_BHTE, key_BHTE, value_BHTE = qkv.permute(2, 0, 3, 1, 4)
        logits_BHTT = self.logits(query_BHTE, key_BHTE)
        future_TT = torch.ones(context, context, dtype=torch.bool, device=x_BTD.device).triu(1)
        weights_BHTT = functional.softmax(logits_BHTT.masked_fill(future_TT, -math.inf), dim=-1)
        mixed_BHTE = weights_BHTT.to(value_BHTE.dtype) @ value_BHTE
        result: Tensor = self.project(mixed_BHTE.transpose(1, 2).reshape(batch, context, width))
        return result


class FeedForward(nn.Module):
    """Two linear layers around a ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) in and out."""
        result: Tensor = self.down(functional.relu(self.up(x_BTD)))
        return result


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) in and out."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        result: Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return result


class LanguageModel(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)
        # Each block adds to the residual stream twice; smaller outputs keep its size independent of the depth (GPT-2).
        for name, parameter in self.named_parameters():
            if name.endswith(("project.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.blocks))

    def forward(self, characters_BT: Tensor) -> Tensor:
        """Logits (B, T, V) for the character after each position."""
        positions_T = torch.arange(characters_BT.shape[1], device=characters_BT.device)
        x_BTD = self.token(characters_BT) + self.position(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        result: Tensor = self.head(self.norm(x_BTD))
        return result


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
