"""The ring: the last steps of this rank in full detail, held in memory and shipped when something goes wrong.

What is merged on the server no longer says which rank held what; the ring does, for the steps *before* a failure too.
It is shipped when the agent sees a non-finite gradient, activation or loss, or when the server asks. Each step is
shipped once, a run ships a bounded number of times, and a few steps after the trigger follow. Agent's thread only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gradiometer import wire
from gradiometer.drops import Drops
from gradiometer.values import is_train_loss

NUM_STEPS: Final = 256
"""Steps kept before the newest."""
MAX_BYTES: Final = 64 * 1024 * 1024
"""Most memory; a model whose steps are larger keeps fewer of them."""
MAX_SHIPS: Final = 8
"""Incidents that are shipped in one run of this process; further ones are counted as dropped."""
STEPS_AFTER: Final = 8
"""Steps after the trigger that are shipped too."""
QUIET_STEPS: Final = 20
"""Trouble that comes back within so many steps is the same incident (the server's rule says the same)."""
DETAIL_BYTES: Final = 1024 * 1024
"""Values in one record; a single step may be larger."""
TOO_OFTEN: Final = "the ring was sent as often as a run may"
_ENTRY_BYTES: Final = 200
"""What Python adds to a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One step of one layer schema, as it was written."""

    schema_id: int
    step: int
    time: float
    values: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.values) + _ENTRY_BYTES


@dataclass(slots=True, kw_only=True)
class _Incident:
    """Why the ring is being shipped. `until`: the last step that follows the trigger."""

    reason: str
    step: int
    until: int
    begun: bool = False


class Ring:
    """Keeps steps and decides when to ship them.

    Args:
        drops: told of incidents that are not shipped any more.
        troubled: told of each incident that is seen here: the step and what went wrong in it.
    """

    def __init__(
        self,
        drops: Drops,
        *,
        max_bytes: int = MAX_BYTES,
        troubled: Callable[[int, str], None] = lambda _step, _reason: None,
    ) -> None:
        self._drops, self._max_bytes, self._troubled = drops, max_bytes, troubled
        self._entries: deque[_Entry] = deque()
        self._num_bytes = 0
        self._num_fresh = 0
        self._newest = -1
        self._nonfinite_step: int | None = None
        self._trouble_step: int | None = None
        self._shipped_for: int | None = None
        self._incident: _Incident | None = None
        self._num_ships = 0
        self._notes: list[wire.Event] = []
        self._told_short = False

    def keep(
        self, schema_id: int, step: int, time_s: float, values: bytes, width: int = len(wire.STATISTICS)
    ) -> None:
        """Take in one step of one layer schema: little-endian float64 of shape (layers, width), non-finite elements last."""
        import numpy as np

        entry = _Entry(schema_id=schema_id, step=step, time=time_s, values=values)
        self._entries.append(entry)
        self._num_bytes += entry.num_bytes
        self._num_fresh += 1
        self._newest = max(self._newest, step)
        numbers = np.frombuffer(values, dtype="<f8")
        # A non-finite element is in the sum, the sum of squares and the extremes, so any set of statistics shows it. The
        # squares of finite ones may be infinite too, and NaN stands for those of a gradient that cannot be read.
        if not np.isfinite(numbers).all() and numbers[width - 1 :: width].any():
            self._nonfinite_step = step
        self._evict()

    def _evict(self) -> None:
        incident, newest = self._incident, self._newest
        if incident is not None and not incident.begun:
            # A busy agent takes in many steps before it sends; those before the trigger must still be there then.
            newest = min(newest, incident.step)
        while self._entries[0].step < newest - NUM_STEPS:
            self._pop()
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            self._pop()
            self._tell_short()

    def _pop(self) -> None:
        self._num_bytes -= self._entries.popleft().num_bytes
        self._num_fresh = min(self._num_fresh, len(self._entries))

    def _tell_short(self) -> None:
        if self._told_short:
            return
        self._told_short = True
        num_steps = len({entry.step for entry in self._entries})
        reason = (
            f"only the last {num_steps} of {NUM_STEPS} steps are kept in full detail: "
            f"they take {self._max_bytes // 2**20} MiB"
        )
        attributes = {"metric": "ring", "reason": reason}
        self._notes.append(
            wire.Event(kind="unavailable", time=time.time(), step=self._newest, attributes=attributes)
        )

    def end_step(self, step: int, *, skipped: bool, modules: Sequence[str] = ()) -> None:
        """Everything of `step` is written: judge it.

        Args:
            skipped: the scaler left this step out, which is its normal business: nothing went into the weights.
            modules: whose output was not finite.
        """
        if skipped:
            return
        if modules:
            self._trouble(step, f"the output of {modules[0]} is not finite")
        elif self._nonfinite_step == step:
            self._trouble(step, "a gradient is not finite")

    def see_scalars(self, step: int, columns: Sequence[wire.Column], row: Sequence[float]) -> None:
        """Numbers of one step: a loss that is not finite is trouble."""
        if all(map(math.isfinite, row)):
            return
        for column, value in zip(columns, row, strict=True):
            if not math.isfinite(value) and is_train_loss(column.name):
                self._trouble(step, f"{column.name} is not finite")

    def ask(self, command: wire.Command) -> None:
        """The server wants the ring; what was shipped for the same incident already is not counted again."""
        step = self._newest if command.step is None else command.step
        if self._shipped_for is not None and abs(step - self._shipped_for) <= QUIET_STEPS:
            return
        self._begin(step, command.reason or "the server asked for it")

    def _trouble(self, step: int, reason: str) -> None:
        before, self._trouble_step = self._trouble_step, step
        if before is None or step - before > QUIET_STEPS:
            self._troubled(step, reason)
            self._begin(step, reason)

    def _begin(self, step: int, reason: str) -> None:
        if self._num_ships >= MAX_SHIPS:
            self._drops.add(TOO_OFTEN, step)
            return
        self._num_ships += 1
        self._shipped_for = step
        until = max(step, self._newest) + STEPS_AFTER
        self._incident = _Incident(reason=reason[: wire.MAX_REASON_CHARS], step=step, until=until)

    def due(self, *, final: bool = False) -> list[wire.Detail | wire.Event]:
        """What is to be sent now; usually nothing. `final`: nothing comes after this."""
        notes, self._notes = list(self._notes), []
        incident = self._incident
        if incident is None or not (final or not incident.begun or self._newest >= incident.until):
            return list(notes)
        over = final or self._newest >= incident.until
        incident.begun = True
        if over:
            self._incident = None
        return [*notes, *self._details(incident)]

    def _details(self, incident: _Incident) -> list[wire.Detail]:
        fresh = list(self._entries)[len(self._entries) - self._num_fresh :]
        self._num_fresh = 0
        by_schema: dict[int, list[_Entry]] = {}
        for entry in fresh:
            by_schema.setdefault(entry.schema_id, []).append(entry)
        return [
            wire.Detail(
                kind="ring",
                reason=incident.reason,
                trigger_step=min(max(incident.step, 0), wire.MAX_STEP),
                schema_id=schema_id,
                steps=tuple(entry.step for entry in part),
                times=tuple(entry.time for entry in part),
                values=b"".join(entry.values for entry in part),
            )
            for schema_id, entries in by_schema.items()
            for part in _split(entries)
        ]


def _split(entries: list[_Entry]) -> list[list[_Entry]]:
    """Runs of entries of about `DETAIL_BYTES` each."""
    parts: list[list[_Entry]] = []
    held_bytes = 0
    for entry in entries:
        if not parts or held_bytes + len(entry.values) > DETAIL_BYTES:
            parts.append([])
            held_bytes = 0
        parts[-1].append(entry)
        held_bytes += len(entry.values)
    return parts
