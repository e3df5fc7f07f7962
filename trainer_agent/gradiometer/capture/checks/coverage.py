"""Check `parameter_not_in_optimizer`: trainable parameters that no optimizer updates.

Every optimizer of the process is seen when it steps, through torch's global hook, so parameters that a second,
unwatched optimizer updates are not reported. The hook goes away when the check is made.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradiometer.capture.checks.finding import CheckReport, Finding, Tally
from gradiometer.capture.checks.sentinel import optimizers_in, parameters_of
from gradiometer.capture.naming import PlainNames
from gradiometer.capture.observer import StepScalars, Watched

CHECK: Final = "parameter_not_in_optimizer"
JUDGED_AFTER: Final = 50
"""Steps. An optimizer of a part that is trained less often has stepped by then, too."""
_MAX_NAMED: Final = 10
_watched_optimizers: Final[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()


class Coverage:
    """Compares the model's trainable parameters with those of all optimizers, once."""

    part = "check parameter_not_in_optimizer"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._num_steps = 0
        self._stepping: weakref.WeakSet[Any] = weakref.WeakSet()
        _watched_optimizers.update(optimizers_in(watched.optimizer))
        self._handle: Any = register_optimizer_step_pre_hook(self._stepped)

    # Hot path: once per step of any optimizer, for 50 steps. Must return None: anything else replaces the arguments.
    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._watched.guard.entered(self.part, self._stepping.add, optimizer)

    def before_read(self) -> None:
        """See `StepObserver`."""

    def end_step(self, step: int) -> StepScalars:
        """See `StepObserver`."""
        self._num_steps += 1
        if self._num_steps == JUDGED_AFTER:
            optimizers = {*self._stepping, *_watched_optimizers}
            self.close()
            found = self._judge(optimizers)
            if found is not None:
                name = self._watched.name
                self._watched.emit(
                    CheckReport(step=step, time=time.time(), watch=name, tally=Tally(), judge=lambda: found)
                )
        return ()

    def close(self) -> None:
        """See `StepObserver`."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _judge(self, optimizers: set[Any]) -> Finding | None:
        model = self._watched.model
        updated = {id(one) for optimizer in optimizers for one in parameters_of(optimizer)}
        named = [(name, one) for name, one in model.named_parameters() if not is_lazy(one)]
        missing = [(name, one) for name, one in named if one.requires_grad and id(one) not in updated]
        num_trainable = sum(1 for _, one in named if one.requires_grad)
        if missing and len(missing) == num_trainable:
            # A loop with float32 copies of half-precision weights looks like this, and is right.
            self._watched.unavailable(
                f"check/{CHECK}", "not checked: no optimizer holds a parameter of the model itself"
            )
            return None
        num_frozen = sum(1 for _, one in named if not one.requires_grad and id(one) in updated)
        return _finding(model, missing, num_frozen) if missing else None


def _finding(model: torch.nn.Module, missing: list[tuple[str, Any]], num_frozen: int) -> Finding:
    plain = PlainNames(model)
    names = [plain.of(name) for name, _ in missing[:_MAX_NAMED]]
    count, num_elements = len(missing), sum(int(one.numel()) for _, one in missing)
    noun = "parameter is" if count == 1 else "parameters are"
    listed = ", ".join(names) + (", ..." if count > len(names) else "")
    frozen = (
        f" ({num_frozen} frozen parameters are in the optimizer, which does no harm.)" if num_frozen else ""
    )
    return Finding(
        check=CHECK,
        title=f"{count} trainable {noun} in no optimizer: {names[0]}{', ...' if count > 1 else ''}",
        text=f"{count} trainable {noun} in no optimizer that has stepped in the first {JUDGED_AFTER} steps, "
        f"{num_elements:,} elements in all, so they keep their first values: {listed}.{frozen}",
        advice="Give them to the optimizer (it was perhaps made before they were added to the model). If they are "
        "meant to stay as they are, set requires_grad_(False): that also saves their part of the backward pass.",
        facts={
            "parameters": count,
            "elements": num_elements,
            "names": names,
            "frozen_in_optimizer": num_frozen,
        },
    )
