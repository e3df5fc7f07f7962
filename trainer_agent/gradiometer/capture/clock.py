"""Numbers the steps of a run: one watch moves the clock, the others report by it. Pure."""

from __future__ import annotations


class StepClock:
    """Counts optimizer steps, skipped ones included.

    Args:
        start_step: steps completed before this process; the next one is `start_step + 1`.
    """

    def __init__(self, start_step: int) -> None:
        self.step = self.start_step = start_step

    def advance(self) -> int:
        """Another step is complete: its number."""
        self.step += 1
        return self.step


class StepNumbers:
    """Numbers the steps of one watch.

    A watch that is not the clock reports at most once per step of the clock: under the last completed one, or, if its
    first step came before the clock's (a loop that trains the discriminator first), always under the next.
    """

    def __init__(self, clock: StepClock, *, is_clock: bool) -> None:
        self._clock, self._is_clock = clock, is_clock
        self._began_at = clock.step
        self._leads: bool | None = None
        self._reported: int | None = None

    def coming(self) -> int:
        """Number of the step under way."""
        leads = self._clock.step == self._began_at if self._leads is None else self._leads
        return self._clock.step + (1 if self._is_clock or leads else 0)

    def next(self) -> tuple[int, bool]:
        """Another step of this watch is complete: its number, and whether it is to be reported."""
        if self._is_clock:
            return self._clock.advance(), True
        if self._leads is None:
            self._leads = self._clock.step == self._began_at
        step = self._clock.step + (1 if self._leads else 0)
        is_new, self._reported = step != self._reported, step
        return step, is_new
