"""Genuine faults for `gradiometer demo --break`: the training really goes wrong, no number is faked.

Each fault changes how the training computes from one step on, in one layer, the way it happens to people.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradiometer.demo.model import Block, LanguageModel, scaled_logits

BROKEN_BLOCK = 2
"""The block that the faults are put into: in the middle, so that naming it is no accident."""
BAD_BATCH_WEIGHT = 100.0
LOGIT_GAIN = 2.0**24
BACKWARD_GAIN = 2.0**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault and the step from which on it acts.

    Attributes:
        kind: as on the command line.
        step: first optimizer step that is hit.
        layer: where the alert should point to; "" if the fault is in the data.
        story: what goes wrong, for the terminal.
    """

    kind: str
    step: int
    layer: str
    story: str

    def strike(self, model: LanguageModel, step: int) -> None:
        """Break the model if `step` is the step; call it before each step's forward pass."""
        if step == self.step and self.kind in _STRIKES:
            block = model.blocks[BROKEN_BLOCK]
            assert isinstance(block, Block)
            _STRIKES[self.kind](block)

    def spoils_batch(self, step: int) -> bool:
        """Whether this step's batch is the bad one."""
        return self.kind == "spike" and step == self.step


def spoiled(
    batch: tuple[Tensor, Tensor], *, vocabulary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A corrupt batch: one rare character over and over, with random characters to follow it."""
    inputs_BT, targets_BT = batch
    random_BT = torch.randint(0, vocabulary, targets_BT.shape, generator=generator)
    return torch.full_like(inputs_BT, vocabulary - 1), random_BT.to(targets_BT.device)


def make_fault(kind: str, step: int) -> Fault:
    """The fault named `kind`; raises `KeyError` for an unknown name."""
    layer, story = _STORIES[kind]
    return Fault(kind=kind, step=step, layer=layer, story=story)


def _overflowing_logits(query_BHTE: Tensor, key_BHTE: Tensor) -> Tensor:
    """Logits kept in float16 that are multiplied where they should be divided: beyond 65,504 they are infinite."""
    return (scaled_logits(query_BHTE, key_BHTE) * LOGIT_GAIN).to(torch.float16)


def _break_attention(block: Block) -> None:
    # The softmax of a row that holds an infinity is NaN, as in a model whose attention logits have grown too far.
    block.attention.logits = _overflowing_logits


class _HalfPrecisionBackward(torch.autograd.Function):
    """Identity whose backward pass holds a badly scaled gradient in float16, like a careless custom kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return (grad * BACKWARD_GAIN).to(torch.float16).to(grad.dtype) / BACKWARD_GAIN


def _break_backward(block: Block) -> None:
    def pass_through(module: nn.Module, inputs: Any, output: Tensor) -> Any:
        return _HalfPrecisionBackward.apply(output)  # type: ignore[no-untyped-call]

    block.mlp.down.register_forward_hook(pass_through)


def _kill_relu(block: Block) -> None:
    # What one far too large update does: every unit is negative for every input, and a ReLU passes no gradient there.
    with torch.no_grad():
        block.mlp.up.bias.fill_(-1000.0)


_STRIKES: dict[str, Callable[[Block], None]] = {
    "nan": _break_attention,
    "scaler": _break_backward,
    "dead-layer": _kill_relu,
}

_PLACE = f"blocks.{BROKEN_BLOCK}"
_STORIES = {
    "nan": (f"{_PLACE}.attention", "attention logits overflow float16, so the softmax gives NaN"),
    "spike": ("", "one corrupt batch with a large loss weight"),
    "scaler": (f"{_PLACE}.mlp.down", "the backward pass overflows float16 at every loss scale"),
    "dead-layer": (f"{_PLACE}.mlp.up", "a bias far below zero shuts every ReLU, so no gradient passes"),
}

FAULTS = tuple(_STORIES)
"""Names that `--break` takes."""
