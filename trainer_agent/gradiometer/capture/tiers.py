"""Decides which statistics of the gradients are read in which step, and says so to people.

Norms (`wire.NORM_STATISTICS`) are read in every step. Full statistics (`wire.STATISTICS`) cost the same one pass where
there is a kernel for them, and are then read in every step too; in plain torch they cost several passes, and are read
in the first of every so many steps, and at once in a step that a CPU finds to be not finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from gradiometer.capture import kernel, native
from gradiometer.reports import EventReport

CHOICES: Final = ("auto", "norm", "full")
DEFAULT_EVERY: Final = 50
"""Full statistics where they cost several passes: at 4 passes instead of 1, a fiftieth of them adds 6 % to the norms."""
MAX_BROKEN: Final = 8
"""Steps in a row that are read again in full because they are not finite: what has diverged will not get better."""
_REST: Final = "sum, minimum, maximum and zeros of a gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """What is read of one watch.

    Attributes:
        every: full statistics in the first of so many steps; 0: never.
        why: the reason, for people.
    """

    every: int
    why: str

    @property
    def told(self) -> str:
        """What is read, and why, in one line."""
        if self.every == 1:
            return f"all in every step ({self.why})"
        if self.every == 0:
            return f"norms in every step ({self.why})"
        return f"norms in every step, all every {self.every} steps ({self.why})"

    @property
    def lack(self) -> str | None:
        """What is not collected in every step, and why; None if everything is."""
        if self.every == 1:
            return None
        when = "not read" if self.every == 0 else f"read in one of {self.every} steps"
        return f"{_REST} are {when}: {self.why}"


EVERYTHING: Final = Tier(every=1, why="asked for")


def choose(statistics: str, every: int | None, device: torch.device, dtypes: set[torch.dtype]) -> Tier:
    """The tier for gradients on `device`.

    Args:
        statistics: what the user wishes, of `CHOICES`.
        every: how often the full statistics are wanted; None: 1 for "full", for "auto" as the device allows.
        dtypes: of the gradients.
    """
    one_pass, why = cheapness(device, dtypes)
    if statistics == "norm":
        return Tier(every=0, why='watch(statistics="norm")')
    if every is not None:
        return Tier(every=every, why=f"watch(every={every})")
    if statistics == "full":
        return Tier(every=1, why='watch(statistics="full")')
    return Tier(every=1 if one_pass else DEFAULT_EVERY, why=why)


def of_watch(
    model: torch.nn.Module, statistics: str, every: int | None, mistaken: Callable[[str, str], None]
) -> Tier:
    """The tier for a model's gradients. `mistaken` is told what is wrong with the user's wish; see `choose`."""
    if statistics not in CHOICES:
        mistaken("grad/layers", f'watch(statistics={statistics!r:.80}) is none of {CHOICES}: "auto" is used')
        statistics = "auto"
    every = every_of("every", every, mistaken)
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    dtypes = {one.dtype for one in parameters if one.requires_grad and one.device == device}
    return choose(statistics, every, device, dtypes)


def every_of(name: str, every: int | None, mistaken: Callable[[str, str], None]) -> int | None:
    """`every`, an argument of `watch` that says how often; None, and `mistaken` is told, if it cannot be that."""
    if every is None or (isinstance(every, int) and not isinstance(every, bool) and every >= 1):
        return every
    mistaken("grad/layers", f"watch({name}={every!r:.80}) is not a whole number from 1 on: it is left out")
    return None


def report_of(tier: Tier, name: str) -> EventReport:
    """Says on the run which statistics are read of the watch called `name`."""
    what = f"gradient statistics of {name}" if name else "gradient statistics"
    return EventReport(kind="environment", time=time.time(), attributes={"facts": {what: tier.told}})


def cheapness(device: torch.device, dtypes: set[torch.dtype]) -> tuple[bool, str]:
    """Whether full statistics take one pass over gradients on `device`, and by what or why not."""
    if device.type == "cpu":
        why_not = native.why_not()
        return why_not is None, "one pass of the native kernel" if why_not is None else _several(why_not)
    if device.type == "cuda":
        why_not = kernel.prepare(device, dtypes)
        return why_not is None, "one pass of the Triton kernel" if why_not is None else _several(why_not)
    return False, _several(f"there is no kernel for {device.type}")


def _several(why_not: str) -> str:
    return f"they take several passes, because the kernel that needs one is not in use: {why_not}"


class Cadence:
    """Which steps of one watch are read in full.

    Steps are counted as the run counts them, so that all ranks choose the same ones. The first step that is read in
    each stretch of `every` steps is full: an optimizer that rests now and then must not miss all of them.

    Args:
        coming: number of the step under way.
    """

    def __init__(self, tier: Tier, coming: Callable[[], int]) -> None:
        self._every, self._coming = tier.every, coming
        self._stretch: int | None = None
        self._full_step: int | None = None
        self._num_broken = 0

    # Hot path: training thread, once per optimizer step.
    def is_full(self) -> bool:
        """Whether the step under way is to be read in full; asked again for one step, the answer is the same."""
        if self._every <= 1:
            return self._every == 1
        step = self._coming()
        if step == self._full_step:
            return True
        stretch, before = (step - 1) // self._every, self._stretch
        self._stretch = stretch
        if stretch != before:
            self._full_step = step
        return stretch != before

    def is_full_too(self, *, finite: bool) -> bool:
        """Whether a step whose norms were read is to be read in full after all, because they are not finite."""
        if finite:
            self._num_broken = 0
            return False
        self._num_broken += 1
        return self._every > 0 and self._num_broken <= MAX_BROKEN


EVERY_STEP: Final = Cadence(EVERYTHING, lambda: 1)
