"""Who wants histograms of the gradients, and in which step each watch takes one. No torch.

A wish comes from user code, from the server or from the agent itself when it sees a value that is not finite. A watch
takes at most one histogram per step, of all its layers, in the pass over the gradients that the wish pays for. A wish of
the server names the step, so that all ranks take the same one and their counts add up to those of the full gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gradiometer import wire
from gradiometer.drops import Drops
from gradiometer.guard import Guard
from gradiometer.plain import text_of

if TYPE_CHECKING:
    from gradiometer.watching import Watches

MAX_ON_ALERT: Final = 64
"""Histograms that one process takes because something went wrong; further ones are counted as dropped."""
QUIET_STEPS: Final = 20
"""Trouble that comes back within so many steps is the same incident, as for the ring."""
MAX_WAITING: Final = 16
"""Wishes of one watch that wait for their step; the oldest ones go."""
TOO_OFTEN: Final = "histograms were taken because of trouble as often as a run may"
NOTHING_WATCHED: Final = "a histogram was asked for, but nothing is watched"
NONFINITE: Final = "a gradient is not finite"
ENDED: Final = "a histogram was asked for, but nothing is watched any more"
AT_CADENCE: Final = "watch(histogram_every={})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A histogram that somebody wants.

    Attributes:
        reason: in words.
        about: the step that it is wanted for; None: none in particular.
        from_step: taken at the first reading of this step or a later one; None: at the next reading.
        on_alert: because something went wrong, and so counted.
    """

    reason: str
    about: int | None = None
    from_step: int | None = None
    on_alert: bool = False


class HistogramDesk:
    """The wishes of a run, handed to every watch.

    Args:
        drops: told of those that are not granted.
        unavailable: told of those whose step never came.
    """

    def __init__(self, drops: Drops, unavailable: Callable[[str, str], None] | None = None) -> None:
        self._drops, self._unavailable = drops, unavailable
        self._has_ended = False
        self._wishes: list[Wishes] = []
        self._num_on_alert = 0

    def join(self, coming: Callable[[], int], *, every: int | None, at_once: bool) -> Wishes:
        """A new watch's wishes; see `Wishes`."""
        made = Wishes(self, coming, every=every, at_once=at_once)
        self._wishes.append(made)
        return made

    def leave(self, wishes: Wishes) -> None:
        """The watch has ended."""
        if wishes not in self._wishes:
            return
        self._wishes.remove(wishes)
        self._has_ended = True
        for wish in wishes.unserved():
            # One that is taken because of an alert nobody waits for.
            if self._unavailable is not None and not wish.on_alert:
                self._unavailable("histogram", _why_unserved(wish))

    def want(self, wish: Wish) -> None:
        """Every watch takes a histogram. Any thread."""
        everybody = list(self._wishes)
        if not everybody and not wish.on_alert:
            # An alert about a run that watches nothing is nobody's mistake.
            self._drops.add(ENDED if self._has_ended else NOTHING_WATCHED, wish.about)
        for one in everybody:
            one.add(wish)

    def command(self, command: wire.Command) -> None:
        """The server asks. Agent's thread."""
        asked = command.reason or "the server asked for it"
        wish = Wish(reason=asked, about=command.step, from_step=command.step, on_alert=command.on_alert)
        self.want(wish)

    def trouble(self, step: int, reason: str) -> None:
        """The agent's thread finds that `step` went wrong: the next reading, unless the watch saw it for itself."""
        for one in list(self._wishes):
            if not one.saw_trouble_near(step):
                one.add(Wish(reason=f"{reason[:200]} (a step after it)", about=step, on_alert=True))

    # Hot path: training thread, in steps that a wish names.
    def grant(self, step: int) -> bool:
        """Whether one more may be taken because of trouble."""
        if self._num_on_alert >= MAX_ON_ALERT:
            self._drops.add(TOO_OFTEN, step)
            return False
        self._num_on_alert += 1
        return True


class Wishes:
    """The wishes of one watch. `add` is for any thread, the rest for the training thread.

    Args:
        coming: number of the step under way.
        every: also at each step whose number is a multiple of this; None: not.
        at_once: a gradient that is found not to be finite while it is there is trouble. Not under a GradScaler,
            which looks for such steps and leaves them out.
    """

    def __init__(
        self, desk: HistogramDesk, coming: Callable[[], int], *, every: int | None, at_once: bool
    ) -> None:
        self._desk, self._coming, self._every, self.at_once = desk, coming, every, at_once
        self._new: deque[Wish] = deque(maxlen=MAX_WAITING)
        self._waiting: list[Wish] = []
        self._step: int | None = None
        self._granted: Wish | None = None
        self._bad_step: int | None = None

    def add(self, wish: Wish) -> None:
        """Take in a wish."""
        self._new.append(wish)

    def saw_trouble_near(self, step: int) -> bool:
        """Whether gradients that are not finite were seen here within `QUIET_STEPS` of `step`."""
        bad_step = self._bad_step
        return bad_step is not None and abs(bad_step - step) <= QUIET_STEPS

    # Hot path: training thread, once per reading.
    def granted(self) -> Wish | None:
        """The wish for which the step under way is to be taken; asked again for one step, the answer is the same."""
        step = self._coming()
        # Several optimizers of one step are read one after the other, and gradients may be read again.
        if step != self._step:
            self._step, self._granted = step, self._decided(step)
        return self._granted

    def unserved(self) -> list[Wish]:
        """Wishes whose step has not come."""
        while self._new:
            self._waiting.append(self._new.popleft())
        return self._waiting

    def _decided(self, step: int) -> Wish | None:
        wish = self._due(step) if self.unserved() else None
        if wish is None and self._every is not None and step % self._every == 0:
            return Wish(reason=AT_CADENCE.format(self._every))
        return wish

    def _due(self, step: int) -> Wish | None:
        due = [wish for wish in self._waiting if wish.from_step is None or wish.from_step <= step]
        self._waiting = [wish for wish in self._waiting if wish not in due][-MAX_WAITING:]
        # Those who asked are served first: what they get is not counted.
        for wish in sorted(due, key=lambda wish: wish.on_alert):
            if not wish.on_alert or self._desk.grant(step):
                return wish
        return None

    def nonfinite(self) -> Wish | None:
        """A gradient of the step under way is not finite: take this step and the next, if that is news."""
        step = self._coming()
        before, self._bad_step = self._bad_step, step
        if self._granted is None and (before is None or step - before > QUIET_STEPS):
            # Where one rank alone holds the first broken value, the next step is the first that all ranks take.
            self.add(
                Wish(reason=f"{NONFINITE} (a step after it)", about=step, from_step=step + 1, on_alert=True)
            )
            if self._desk.grant(step):
                self._granted = Wish(reason=NONFINITE, about=step, on_alert=True)
        return self._granted


def _why_unserved(wish: Wish) -> str:
    wanted = "the next step" if wish.from_step is None else f"step {wish.from_step}"
    return f"one was asked for ({wish.reason[:200]}), to be taken in {wanted}, but the watch ended before"


class AsksForHistograms:
    """The part of a run that takes histograms when the user says so."""

    _feeder: Any
    _guard: Guard
    _watches: Watches

    def histograms(self, reason: str = "") -> None:
        """Take a histogram of every layer's gradient in the step under way, or the next one; never raises.

        The gradients are read when they are complete, so this is in time anywhere before `optimizer.step()` or the
        clipping. Call it on all ranks. `reason`: kept with it.
        """
        if self._feeder is not None:
            self._guard.tolerate("histograms", self._want_histograms, reason)

    def _want_histograms(self, reason: Any) -> None:
        wish = Wish(reason=text_of(reason)[: wire.MAX_REASON_CHARS] or "run.histograms()")
        self._watches.histograms.want(wish)
