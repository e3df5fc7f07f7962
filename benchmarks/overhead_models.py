"""Models of the overhead benchmark: plain torch modules of the usual shapes, with random weights and data.

What reading gradients costs depends on the number and the sizes of the parameters, and what it is compared with on
the arithmetic of a step. Neither needs trained weights, a data set or another package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its optimizer and the loss of one batch."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], torch.Tensor]

    @property
    def num_tensors(self) -> int:
        return len(list(self.model.parameters()))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


class Block(nn.Module):
    """A transformer block as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attn(self.ln_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = (
            functional.scaled_dot_product_attention(*parts, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.proj(seen)
        return x + self.down(functional.gelu(self.up(self.ln_2(x))))


class Gpt2(nn.Module):
    """GPT-2 small: 124.4 million parameters in 148 tensors, the head tied to the token embedding."""

    def __init__(
        self, vocabulary: int = 50257, length: int = 1024, width: int = 768, depth: int = 12
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 12) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.ln_f(x), self.tokens.weight)


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            convolution = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """25.6 million parameters in 161 tensors."""
    stages: list[nn.Module] = []
    inputs = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(depth):
            stages.append(Bottleneck(inputs, width, stride if index == 0 else 1))
            inputs = 4 * width
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def gpt2_workload(num_tokens: int) -> Workload:
    model = Gpt2()
    tokens = torch.randint(50257, (1, num_tokens + 1))

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])

    return _workload(f"GPT-2 124M, {num_tokens} tokens", model, loss)


def resnet50_workload(batch: int = 2, size: int = 112) -> Workload:
    model = resnet50()
    images, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    return _workload(
        f"ResNet-50, batch {batch} of {size}x{size}",
        model,
        lambda: functional.cross_entropy(model(images), labels),
    )


def small_workload(num_layers: int = 1000, width: int = 32) -> Workload:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    for layer in model:
        nn.init.eye_(layer.weight)
    batch = torch.randn(8, width)
    return _workload(f"{2 * num_layers:,} small tensors", model, lambda: model(batch).square().mean())


def layers200_workload(batch: int = 64, width: int = 256) -> Workload:
    """Large layers for the size of the batch: reading the gradients is a large part of a step (scenario R65)."""
    model = nn.Sequential(*(layer for _ in range(200) for layer in (nn.Linear(width, width), nn.ReLU())))
    inputs, targets = torch.randn(batch, width), torch.randn(batch, width)
    return _workload(
        f"200 x (Linear {width} + ReLU), batch {batch}",
        model,
        lambda: functional.mse_loss(model(inputs), targets),
    )


def _workload(name: str, model: nn.Module, loss: Callable[[], torch.Tensor]) -> Workload:
    return Workload(
        name=name, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5), loss=loss
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt2-64": lambda: gpt2_workload(64),
    "gpt2-512": lambda: gpt2_workload(512),
    "resnet50": resnet50_workload,
    "small": small_workload,
    "layers200": layers200_workload,
}
