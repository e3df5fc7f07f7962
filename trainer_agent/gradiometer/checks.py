"""Checks that you call yourself, in a test or before a long run: is the gradient right, is accumulation divided right?

Both work on a copy of the model, in float64 where the model allows it, with the random numbers of every evaluation
seeded alike. Model, gradients, modes, buffers and random state are left as they were. This module does not import
torch until a check is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LossFunction = Callable[[Any, Any], Any]
"""`loss_fn(model, batch)`: a loss with one element. It must use the model that it is given, not another name for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRow:
    """One parameter's autograd gradient against central differences.

    Attributes:
        num_checked: coordinates compared; a complex element has two. num_kinks: coordinates left out, because the loss is not smooth there.
        worst_error: largest absolute difference; `autograd` and `difference` are the two values where it is.
        is_ok: every compared coordinate is within the tolerance.
    """

    name: str
    shape: tuple[int, ...]
    num_checked: int
    num_kinks: int
    worst_error: float
    autograd: float
    difference: float
    is_ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientResult:
    """Outcome of `gradients`; `print` it.

    Attributes:
        rows: in the order of `model.named_parameters()`.
        dtype: what was computed in: "float64", or the model's own dtype where it refuses float64.
        relative, absolute: the tolerance: |difference| <= absolute + relative * the larger of the two values.
    """

    rows: tuple[GradientRow, ...]
    dtype: str
    loss: float
    relative: float
    absolute: float

    @property
    def ok(self) -> bool:
        """Whether every parameter's gradient is right."""
        return all(row.is_ok for row in self.rows)

    def __str__(self) -> str:
        wrong = [row for row in self.rows if not row.is_ok]
        verdict = "all right" if self.ok else f"{len(wrong)} of {len(self.rows)} parameters are WRONG"
        width = max((len(row.name) for row in self.rows), default=4)
        lines = [
            f"gradients in {self.dtype}, loss {self.loss:.6g}: {verdict} "
            f"(tolerance {self.absolute:.1e} + {self.relative:.1e} * value)",
            f"  {'parameter':{width}}  checked  kinks      autograd    difference  worst error",
        ]
        lines += [
            f"  {row.name:{width}}  {row.num_checked:7d}  {row.num_kinks:5d}  {row.autograd:12.5g}  "
            f"{row.difference:12.5g}  {row.worst_error:11.2e}  {'ok' if row.is_ok else 'WRONG'}"
            for row in self.rows
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationResult:
    """Outcome of `accumulation`; `print` it.

    Attributes:
        ratio: the factor by which the accumulated gradient fits the whole batch's gradient best; 1 is right.
        relative_error: norm of what is left after that factor, relative to the whole batch's gradient.
        divisor: what each micro-batch's loss was divided by.
        tolerance: of both.
        message: what it means and what to do.
    """

    ratio: float
    relative_error: float
    num_batches: int
    divisor: float
    tolerance: float
    message: str

    @property
    def ok(self) -> bool:
        """Whether the accumulated gradient is the gradient of the whole batch."""
        return abs(self.ratio - 1.0) <= self.tolerance and self.relative_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "right" if self.ok else "WRONG"
        return (
            f"accumulation over {self.num_batches} micro-batches, each loss divided by {self.divisor:g}: {verdict}; "
            f"{self.ratio:.6g} times the whole batch's gradient, rest {self.relative_error:.1e}. {self.message}"
        )


def gradients(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    num_coordinates: int = 8,
    relative: float | None = None,
    absolute: float | None = None,
    only: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> GradientResult:
    """Compare autograd with central differences, (f(x + h) - f(x - h)) / 2h, on sampled coordinates of each parameter.

    h is the cube root of the dtype's epsilon times max(1, |x|), which balances truncation against rounding (Press et
    al., Numerical Recipes, 3rd ed., section 5.7). A coordinate where the loss has a kink (ReLU) within h is left out: the
    slopes above and below differ there, with h/2 as with h. Costs four evaluations of the loss per coordinate.

    Args:
        model: in the mode (train or eval) in which it is to be checked; a plain module, not wrapped in DDP or FSDP.
        loss_fn: see `LossFunction`.
        batch: what `loss_fn` gets; floating-point tensors in it, also inside lists, tuples and dicts, become float64.
        num_coordinates: random ones per parameter; the one with the largest autograd gradient is added.
        relative, absolute: the tolerance; None: 1e-5 and 1e-7 * max(1, |loss|) in float64, 2e-2 and 2e-3 *
            max(1, |loss|) in float32.
        only: takes a parameter's name; only those for which it is true are checked.
        seed: of the coordinates and of the random numbers (dropout) in every evaluation.

    Raises:
        ValueError: the loss has more than one element, does not depend on the model it was given, is not finite, or is
            not the same twice; or the model cannot be copied.
    """
    from gradiometer.capture import differences

    return differences.gradients(
        model,
        loss_fn,
        batch,
        num_coordinates=num_coordinates,
        relative=relative,
        absolute=absolute,
        only=only,
        seed=seed,
    )


def accumulation(
    model: torch.nn.Module,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    *,
    divisor: float | None = None,
    whole: Any = None,
    train: bool = False,
    tolerance: float | None = None,
    seed: int = 0,
) -> AccumulationResult:
    """Compare the gradient that accumulates over `batches` with the gradient of the same samples as one batch.

    Args:
        model: a plain module, not wrapped in DDP or FSDP.
        loss_fn: the loss *before* any division for accumulation; see `LossFunction`.
        batches: the micro-batches of one optimizer step.
        divisor: what your loop divides each loss by; None: their number.
        whole: all samples as one batch; None: the micro-batches joined along the first dimension of each tensor.
        train: run the model in training mode. Off, because dropout draws other masks for a batch of another size, and
            batch normalisation makes the two differ by design.
        tolerance: None: 1e-6 in float64, 1e-3 in float32.
        seed: of the random numbers in every evaluation.

    Raises:
        ValueError: as `gradients`; or there are no batches, or they cannot be joined.
    """
    from gradiometer.capture import equivalence

    return equivalence.accumulation(
        model, loss_fn, batches, divisor=divisor, whole=whole, train=train, tolerance=tolerance, seed=seed
    )
