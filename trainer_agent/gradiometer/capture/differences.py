"""Autograd against central differences, parameter by parameter: `gradiometer.checks.gradients`.

A complex parameter has two coordinates per element, its real and its imaginary part. The gradient that torch gives of a
real loss L is dL/dRe + i dL/dIm, twice the conjugate Wirtinger derivative (PyTorch, Autograd mechanics, section
"Autograd for Complex Numbers", https://docs.pytorch.org/docs/stable/notes/autograd.html), so both are compared alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from gradiometer.capture.exact_copy import ExactCopy
from gradiometer.checks import GradientResult, GradientRow

_TOLERANCES: Final = {torch.float64: (1e-5, 1e-7)}
_COARSE: Final = (2e-2, 2e-3)
"""Relative, and absolute per unit of loss: float32 differences carry about four digits."""

_HALVED: Final = 0.75
"""Between 1/2, to which a smooth loss's bend falls when the step is halved, and 1, where that of a kink stays."""


class _Comparison:
    """Compares single coordinates of one copy."""

    def __init__(self, exact: ExactCopy, loss: float, relative: float, absolute: float) -> None:
        self._loss = loss
        self._exact, self._relative, self._absolute = exact, relative, absolute
        self._epsilon = torch.finfo(exact.dtype).eps

    def row(
        self, name: str, shape: tuple[int, ...], parameter: Any, gradient: Any, indices: list[int]
    ) -> GradientRow:
        """Compare some coordinates, given as positions in the flattened parameter, both as of `_real`."""
        num_kinks, compared = 0, []
        for index in indices:
            autograd = 0.0 if gradient is None else float(gradient.reshape(-1)[index])
            difference = self._difference(parameter, index)
            if difference is None:
                num_kinks += 1
            else:
                compared.append((abs(autograd - difference), autograd, difference))
        # A NaN on either side is the worst of all, and never within a tolerance.
        worst = max(compared, key=lambda one: (one[0] != one[0], one[0]), default=(0.0, 0.0, 0.0))
        return GradientRow(
            name=name,
            shape=shape,
            num_checked=len(compared),
            num_kinks=num_kinks,
            worst_error=worst[0],
            autograd=worst[1],
            difference=worst[2],
            is_ok=all(self._agree(one, other) for _, one, other in compared),
        )

    def _difference(self, parameter: Any, index: int) -> float | None:
        """The derivative by central differences; None where the loss has a kink within the step.

        Of a smooth loss the one-sided slopes differ by h f'', which halves with h; of a kink they differ by a constant.
        """
        x = float(_view_of(parameter, index))
        step = self._epsilon ** (1 / 3) * max(1.0, abs(x))
        wide, bent = self._slopes(parameter, index, x, step)
        narrow, bent_less = self._slopes(parameter, index, x, step / 2)
        is_kink = not self._agree(bent_less, 0.0) and abs(bent_less) > _HALVED * abs(bent)
        return None if is_kink or not self._agree(wide, narrow) else narrow

    def _slopes(self, parameter: Any, index: int, x: float, step: float) -> tuple[float, float]:
        """The central difference, and by how much the slopes above and below differ."""
        above, x_above = self._loss_at(parameter, index, x, x + step)
        below, x_below = self._loss_at(parameter, index, x, x - step)
        # By the distance between the numbers as they were stored, which is not exactly 2 * step.
        central = (above - below) / (x_above - x_below)
        return central, (above - self._loss) / (x_above - x) - (self._loss - below) / (x - x_below)

    def _loss_at(self, parameter: Any, index: int, x: float, moved: float) -> tuple[float, float]:
        place = _view_of(parameter, index)
        with torch.no_grad():
            place.fill_(moved)
            stored = float(place)
            try:
                return self._exact.loss(self._exact.batches[0]).item(), stored
            finally:
                place.fill_(x)

    def _agree(self, one: float, other: float) -> bool:
        return abs(one - other) <= self._absolute + self._relative * max(abs(one), abs(other))


def gradients(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    num_coordinates: int,
    relative: float | None,
    absolute: float | None,
    only: Callable[[str], bool] | None,
    seed: int,
) -> GradientResult:
    """See `gradiometer.checks.gradients`."""
    exact = ExactCopy(model, loss_fn, [batch], train=None, seed=seed)
    with exact.alike():
        loss = exact.loss(exact.batches[0]).item()
        found = exact.gradient_of(lambda: iter([exact.loss(exact.batches[0])]))
        default_relative, per_loss = _TOLERANCES.get(exact.dtype, _COARSE)
        relative = default_relative if relative is None else relative
        absolute = per_loss * max(1.0, abs(loss)) if absolute is None else absolute
        comparison = _Comparison(exact, loss, relative, absolute)
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for name, parameter in exact.trainable():
            if (only is None or only(name)) and parameter.numel():
                real, gradient = _real(parameter), _real(found[name])
                indices = _indices(real, gradient, num_coordinates, generator)
                rows.append(comparison.row(name, tuple(parameter.shape), real, gradient, indices))
    return GradientResult(
        rows=tuple(rows),
        dtype=str(exact.dtype).removeprefix("torch."),
        loss=loss,
        relative=relative,
        absolute=absolute,
    )


def _indices(parameter: Any, gradient: Any, count: int, generator: torch.Generator) -> list[int]:
    """Random positions, without repetition, and that of the largest gradient."""
    numel = parameter.numel()
    if numel <= count:
        return list(range(numel))
    drawn = torch.randint(numel, (count,), generator=generator).tolist()
    if gradient is not None:
        drawn.append(int(gradient.abs().reshape(-1).argmax()))
    return sorted(set(drawn))


def _real(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, dense; of a complex one a view of shape (..., 2) with real and imaginary parts."""
    if tensor is None:
        return None
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _view_of(parameter: Any, index: int) -> torch.Tensor:
    """A 0-dim view of one element, whatever the strides."""
    where = []
    for size in reversed(parameter.shape):
        where.append(index % size)
        index //= size
    view: torch.Tensor = parameter.detach()[tuple(reversed(where))]
    return view
