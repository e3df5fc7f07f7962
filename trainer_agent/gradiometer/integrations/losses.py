"""The mean of the raw losses of the micro-batches of one optimizer step, on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class LossWindow:
    """Sums losses up without waiting for the device; keeps no graph."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._num_losses = 0

    # Hot path: training thread, once per micro-batch. Must read no value.
    def add(self, loss: Any, factor: float = 1.0) -> None:
        """Another micro-batch, with `factor` times this loss; what is not a one-element tensor has none to take."""
        # Not at the top: an integration is to say what is missing before torch does.
        import torch

        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        with torch.no_grad():
            # float32, as a sum in half precision would round. Times 1 is a copy: nobody else holds the result.
            value = loss.detach().reshape(()).float() * factor
            self._sum = value if self._sum is None else self._sum + value
        self._num_losses += 1

    def take(self, *, mean: bool) -> torch.Tensor | None:
        """The mean, or the sum, of the losses since the last call; None if there was none."""
        total, count = self._sum, self._num_losses
        self._sum, self._num_losses = None, 0
        return total / count if mean and total is not None else total
