"""The flight recorder's desk: what the user hands to it, what the server asks of it, and where it saves. No torch.

The run holds it, the recorder itself (`capture/flight_recorder.py`) works at it on the training thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gradiometer import wire
from gradiometer.guard import Guard
from gradiometer.reports import EventReport, Report

if TYPE_CHECKING:
    from gradiometer.launch import Launch
    from gradiometer.settings import Settings

MAX_BATCHES: Final = 64
"""Micro-batches of one step that are kept; of a step with more, the first ones."""


def desk_of(resolved: Settings, identity: Launch | None, emit: Callable[[Report], None]) -> FlightDesk | None:
    """The desk of a run; None where the recorder is off."""
    if resolved.flight_recorder is None or identity is None:
        return None
    return FlightDesk(
        folder=resolved.flight_recorder / identity.run_id,
        max_dumps=resolved.max_dumps,
        run_id=identity.run_id,
        rank=identity.rank,
        host=socket.gethostname(),
        emit=emit,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class FlightDesk:
    """One run's flight recorder, as far as it needs no torch.

    Attributes:
        folder: where dumps go; on a file system that all ranks share.
        max_dumps: most dumps of this process.
        run_id, rank, host: named in the manifest and in the event.
        emit: takes a report; must not wait.
        asked: set by the agent's thread when the server asks for a dump, taken by the training thread.
        batches: what the user recorded in the step under way, by reference.
        begin_step: the recorder's, while it works: called with every batch.
    """

    folder: Path
    max_dumps: int
    run_id: str
    rank: int
    host: str
    emit: Callable[[Report], None]
    asked: wire.Command | None = None
    batches: list[Any] = field(default_factory=list)
    begin_step: Callable[[], None] | None = None

    def record(self, batch: Any) -> None:
        """Keep a micro-batch of the step under way until the step ends; nothing where no recorder would let it go."""
        if self.begin_step is None:
            return
        self.begin_step()
        if len(self.batches) < MAX_BATCHES:
            self.batches.append(batch)

    def told(self, step: int, path: Path, *, reason: str, num_bytes: int, rank: int) -> None:
        """Say that the state before `step` was saved."""
        attributes = {
            "path": str(path),
            "reason": reason,
            "host": self.host,
            "bytes": num_bytes,
            "rank": rank,
        }
        self.emit(EventReport(kind="dump", time=time.time(), step=step, attributes=attributes))


class RecordsBatches:
    """The part of a run that hands batches to the flight recorder."""

    _flight: FlightDesk | None = None
    _guard: Guard

    def record_batch(self, batch: Any) -> None:
        """Say what the step under way is computed from, before its forward pass; never raises.

        Only of use with `init(flight_recorder=...)`; otherwise it does nothing. Call it once per micro-batch. The
        batch is kept by reference until the optimizer step ends, and is saved if that step goes wrong: tensors, numbers,
        strings and containers of them. Without it, what the model's forward was called with is saved.
        """
        if self._flight is not None:
            self._guard.entered_tolerantly("flight recorder", self._flight.record, batch)
