"""Decides when the steps of several optimizers make one step of the training. Pure: knows indices, not tensors.

A step is complete when every optimizer that has something to train has stepped; if some leave a step out, it is
complete when one of them steps again, or when new gradients arrive for one that has stepped. Optimizers that step
inside the backward pass (one per parameter) are complete when that pass ends.
"""

from __future__ import annotations

from collections.abc import Callable


class Together:
    """The step under way of the optimizers 0 to n-1."""

    def __init__(self) -> None:
        self._ever_outside: set[int] = set()
        self._ever_inside: set[int] = set()
        self._num_complete = 0
        self._forget()

    def _forget(self) -> None:
        self._done: set[int] = set()
        self._waiting: set[int] | None = None
        self._backward_is_over = False

    @property
    def is_under_way(self) -> bool:
        """Whether some have stepped and others are waited for."""
        return bool(self._done)

    def has_stepped(self, index: int) -> bool:
        """Whether this optimizer stepped in the step under way."""
        return index in self._done

    def begins_another(self, index: int, *, in_backward: bool, has_new_gradients: Callable[[], bool]) -> bool:
        """Whether the step under way was over before optimizer `index` is about to step now.

        Args:
            in_backward: it steps inside a backward pass.
            has_new_gradients: whether one that has stepped got a new gradient since.
        """
        if not self._done:
            return False
        if index in self._done:
            return True
        return self._backward_is_over if in_backward else has_new_gradients()

    def stepped(self, index: int, *, in_backward: bool, live: Callable[[], set[int]]) -> bool:
        """Optimizer `index` stepped (or was skipped by the scaler); returns whether that completes the step.

        Args:
            live: those that have something to train, asked for once per step.
        """
        (self._ever_inside if in_backward else self._ever_outside).add(index)
        if self._waiting is None:
            self._waiting = live()
        self._done.add(index)
        self._waiting.discard(index)
        return not self._waiting

    def backward_ended(self) -> bool:
        """The backward pass in which some stepped has ended; returns whether that completes the step."""
        if self._waiting is None:
            return False
        self._backward_is_over = True
        # Whoever steps only in backward passes had a chance to. In the first step nobody is known to do so.
        had_their_chance = self._ever_inside - self._ever_outside
        if self._num_complete:
            self._waiting &= self._ever_outside
        self._waiting -= had_their_chance
        return not self._waiting

    def complete(self) -> None:
        """The step was ended."""
        self._num_complete += 1
        self._forget()
