"""What the agents' door needs from the rest of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradiometer_server.clock import Clock
from gradiometer_server.domain.live import LiveUpdate
from gradiometer_server.fold.pipeline import FoldPipeline
from gradiometer_server.ingest.commands import CommandDesk
from gradiometer_server.ingest.deleted import DeletedRuns
from gradiometer_server.ingest.room import Room
from gradiometer_server.ingest.tally import Tally
from gradiometer_server.store.database import Database
from gradiometer_server.store.log import LogWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestServices:
    """Started parts, shared by all connections.

    Attributes:
        publish: to the live feed; thread-safe, never waits.
        server_version: told to agents in the welcome.
        tally: what agents got wrong.
        commands: what agents are asked to do.
        deleted: runs that somebody deleted meanwhile.
        room: what all connections together hold.
    """

    database: Database
    log: LogWriter
    pipeline: FoldPipeline
    clock: Clock
    publish: Callable[[Sequence[LiveUpdate]], None]
    server_version: str
    tally: Tally
    commands: CommandDesk
    deleted: DeletedRuns
    room: Room = field(default_factory=Room)
