"""Which logged tensors are training losses, and what their last operation tells about how they were reduced."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch

Kind = Literal["mean", "sum", "scaled", "unknown"]

_TRANSPARENT: Final = (
    "ToCopyBackward",
    "ViewBackward",
    "UnsafeViewBackward",
    "ReshapeAliasBackward",
    "SqueezeBackward",
    "UnsqueezeBackward",
    "CloneBackward",
    "AliasBackward",
)
_REDUCING: Final = (
    "NllLossBackward",
    "NllLoss2DBackward",
    "MseLossBackward",
    "BinaryCrossEntropyBackward",
    "BinaryCrossEntropyWithLogitsBackward",
    "SmoothL1LossBackward",
    "HuberLossBackward",
    "SoftMarginLossBackward",
)
_SCALING: Final = ("DivBackward", "MulBackward")
_MEAN: Final = 1
_SUM: Final = 2
_MAX_NODES: Final = 64


def kind_of(loss: torch.Tensor) -> Kind:
    """Whether `loss` is visibly a mean, a sum, or something multiplied by a number; "unknown" if it cannot be seen.

    Only a mean proves that micro-batches must be divided: a sum over tokens divided by a count of the whole step
    ("scaled") is right without, and so is a loss that was divided before it was logged.
    """
    return _kind(loss.grad_fn, [_MAX_NODES])


def _kind(node: Any, budget: list[int]) -> Kind:
    budget[0] -= 1
    if node is None or budget[0] < 0:
        return "unknown"
    name = node.name().rstrip("0123456789")
    if name in _TRANSPARENT:
        return _kind(node.next_functions[0][0], budget)
    if name == "MeanBackward":
        return "mean"
    if name == "SumBackward":
        return "sum"
    if name in _SCALING:
        return "scaled"
    if name in _REDUCING:
        reduction = getattr(node, "_saved_reduction", None)
        return "mean" if reduction == _MEAN else "sum" if reduction == _SUM else "unknown"
    if name == "AddBackward":
        return _kind_of_terms([_kind(term, budget) for term, _ in node.next_functions if term is not None])
    return "unknown"


def _kind_of_terms(kinds: list[Kind]) -> Kind:
    """Of `loss + 0.1 * penalty`: the term without a factor decides."""
    if "unknown" in kinds or "sum" in kinds:
        return "unknown"
    return "mean" if "mean" in kinds else "scaled"
