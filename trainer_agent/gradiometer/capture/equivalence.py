"""The gradient of an accumulation loop against that of the whole batch: `gradiometer.checks.accumulation`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from gradiometer.capture.exact_copy import ExactCopy
from gradiometer.checks import AccumulationResult

_FINE: Final = 1e-6
_COARSE: Final = 1e-3


def accumulation(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    *,
    divisor: float | None,
    whole: Any,
    train: bool,
    tolerance: float | None,
    seed: int,
) -> AccumulationResult:
    """See `gradiometer.checks.accumulation`."""
    if not batches:
        raise ValueError("there are no micro-batches: pass those of one optimizer step")
    by = float(len(batches)) if divisor is None else float(divisor)
    together = _joined(list(batches), "batch") if whole is None else whole
    exact = ExactCopy(model, loss_fn, [together, *batches], train=train, seed=seed)
    one, parts = exact.batches[0], exact.batches[1:]

    def divided() -> Iterator[torch.Tensor]:
        return (exact.loss(part) / by for part in parts)

    with exact.alike():
        wanted = _flat(exact, exact.gradient_of(lambda: iter([exact.loss(one)])))
        found = _flat(exact, exact.gradient_of(divided))
    ratio, rest = _fit(found, wanted)
    allowed = (_FINE if exact.dtype == torch.float64 else _COARSE) if tolerance is None else tolerance
    return AccumulationResult(
        ratio=ratio,
        relative_error=rest,
        num_batches=len(parts),
        divisor=by,
        tolerance=allowed,
        message=_message(ratio, rest, allowed, by, exact.model),
    )


def _flat(exact: ExactCopy, gradients: dict[str, torch.Tensor | None]) -> torch.Tensor:
    parts = []
    for name, parameter in exact.trainable():
        gradient = gradients[name]
        dense = torch.zeros_like(parameter) if gradient is None else gradient
        dense = (dense.to_dense() if dense.layout != torch.strided else dense).detach()
        real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        parts.append(real.reshape(-1).cpu())
    return torch.cat(parts).to(torch.float64)


def _fit(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Least squares: the factor r for which r * wanted is nearest to found, and the rest relative to r * wanted."""
    size = float(wanted.norm())
    if size == 0.0:
        return (1.0 if float(found.norm()) == 0.0 else math.inf), 0.0
    ratio = float(found @ wanted) / size**2
    return ratio, float((found - ratio * wanted).norm()) / (abs(ratio) * size or size)


def _message(ratio: float, rest: float, allowed: float, by: float, model: torch.nn.Module) -> str:
    if rest <= allowed:
        if abs(ratio - 1.0) <= allowed:
            return "The accumulated gradient is that of the whole batch."
        return f"Divide each loss by {by * ratio:.6g} instead of {by:g}."
    if any(
        isinstance(one, torch.nn.modules.batchnorm._BatchNorm) and one.training for one in model.modules()
    ):
        return "Batch normalisation in training mode uses each micro-batch's own statistics, so the two differ by design."
    return (
        "No single factor makes them equal: the micro-batches count differently (unequal numbers of samples, or of "
        "tokens that are not ignored). Sum the losses, and divide by the number of samples or tokens in the whole step."
    )


def _joined(parts: list[Any], where: str) -> Any:
    """Micro-batches as one, tensors joined along their first dimension."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.ndim == 0:
            raise ValueError(f"{where} has no dimension to join along: pass whole=")
        try:
            return torch.cat(parts)
        except RuntimeError as error:
            raise ValueError(f"{where} cannot be joined ({error}): pass whole=") from error
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts], f"{where}[{key!r}]") for key in first}
    if isinstance(first, (list, tuple)):
        joined = [
            _joined([part[index] for part in parts], f"{where}[{index}]") for index in range(len(first))
        ]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if all(part == first for part in parts):
        return first
    raise ValueError(f"{where} is a {type(first).__name__}, which cannot be joined: pass whole=")
