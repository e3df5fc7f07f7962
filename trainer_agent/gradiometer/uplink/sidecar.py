"""The uplink process: finds the sources of one attempt, delivers their spools, and ends when nothing is left.

Two tasks share one event loop: `_keep_house` looks at the disk and at the trainers, `_deliver` talks to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gradiometer import __version__, spool
from gradiometer.spool import SpoolError
from gradiometer.uplink.backoff import Backoff
from gradiometer.uplink.delivery import Delivery, Stop, wait_briefly
from gradiometer.uplink.source import Source
from gradiometer.uplink.state import (
    LOG,
    STATE,
    WAKE_SOCKET,
    Lock,
    UplinkState,
    open_wake_socket,
    write_state,
)

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_TICK_WITHOUT_SOCKET_S: Final = 0.05
_SHORTEST_TICK_S: Final = 0.02
_STATE_S: Final = 0.5
_FIRST_SOURCE_S: Final = 60.0
_TERMINATE_S: Final = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long an uplink stays.

    Attributes:
        linger_s: how long to go on trying after the last trainer ended.
        drain: deliver what is there now and end, whether or not the trainers live (`gradiometer sync`).
        give_up_s: with `drain`, how long to go on without an acknowledgement.
    """

    linger_s: float = spool.LINGER_S
    drain: bool = False
    give_up_s: float = 10.0


class Uplink:
    """Delivers one attempt's spools. `run` once; the caller holds the lock, which `run` removes with the folder.

    `ready` is called as soon as trainers can wake it.

    Attributes:
        sources: by rank.
        num_sent: records acknowledged by the server during this run, per rank.
        delivered: afterwards, whether the server has everything.
    """

    def __init__(
        self,
        attempt_directory: Path,
        *,
        url: str,
        token: str | None,
        lock: Lock,
        options: Options,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = attempt_directory
        self._url, self._lock, self._options, self._ready = url, lock, options, ready
        self.sources: dict[int, Source] = {}
        self.num_sent: dict[int, int] = {}
        self.delivered = False
        self.disk_error = ""
        self._house = asyncio.Event()
        self._delivery = Delivery(
            url=url,
            token=token,
            agent_version=__version__,
            backoff=Backoff(random.random),
            sources=self.sources,
            progressed=self._progressed,
        )
        self._started_s = self._progress_s = time.monotonic()
        self._ended_s: float | None = None
        self._terminate_s = float("inf")
        self._state_written_s = 0.0
        self._last_state: UplinkState | None = None

    @property
    def last_error(self) -> str:
        """What went wrong last and is not mended; empty if nothing."""
        return self.disk_error or self._delivery.last_error

    async def run(self) -> bool:
        """Deliver until nothing is left or patience ends; True if the server has everything."""
        loop = asyncio.get_running_loop()
        if not self._options.drain:
            loop.add_signal_handler(signal.SIGTERM, self._terminate)
        wake_socket = open_wake_socket(self._directory)
        if wake_socket is not None:
            loop.add_reader(wake_socket, self._woken, wake_socket)
        # Before the trainer goes on: one that ends in the next millisecond is then watched already.
        self._look()
        # Nobody may take what the uplink before this one wrote last for its own word.
        self._write_down()
        self._ready()
        tick_s = _TICK_S if wake_socket is not None else _TICK_WITHOUT_SOCKET_S
        deliver = asyncio.create_task(self._deliver(), name="deliver")
        try:
            await self._keep_house(tick_s, deliver)
        finally:
            deliver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await deliver
            if wake_socket is not None:
                loop.remove_reader(wake_socket)
                wake_socket.close()
                (self._directory / WAKE_SOCKET).unlink(missing_ok=True)
            for source in self.sources.values():
                self._forget(source)
        return self.delivered

    async def _deliver(self) -> None:
        try:
            await self._delivery.run()
        except Stop as stop:
            logger.error("stopped: %s", stop)

    async def _keep_house(self, tick_s: float, deliver: asyncio.Task[None]) -> None:
        while True:
            await wait_briefly(self._house, tick_s)
            self._house.clear()
            if deliver.done() and not deliver.cancelled():
                # A fatal answer ends delivery, but how the trainers end is recorded all the same.
                deliver.result()
            if not self._directory.is_dir():
                logger.warning("%s was removed by somebody else; nothing is left to deliver", self._directory)
                return
            self._look()
            self._write_down()
            if self._is_over() and self._leave():
                return
            await asyncio.sleep(_SHORTEST_TICK_S)

    def _look(self) -> None:
        """Take up new ranks, see what was written, notice deaths."""
        self.disk_error = ""
        news = False
        try:
            news = self._take_up_new_sources()
            for source in list(self.sources.values()):
                if source.directory.is_dir():
                    news = source.look() or news
                else:
                    self._drop(source)
        except (SpoolError, OSError) as error:
            self._note_disk_error(str(error))
        if news:
            self._delivery.more.set()

    def _take_up_new_sources(self) -> bool:
        known = {source.directory.name for source in self.sources.values()}
        new = [path for path in self._directory.glob("rank-*") if path.name not in known]
        for directory in sorted(new):
            try:
                run, source = spool.read_run(self._directory), Source(directory)
            except FileNotFoundError:
                # Still being made; its maker writes `source.json` last.
                continue
            self.sources[source.rank] = source
            self.num_sent[source.rank] = 0
            self._delivery.add_source(run, source)
            if source.watch is not None and source.watch.pidfd is not None:
                asyncio.get_running_loop().add_reader(source.watch.pidfd, self._died, source)
            logger.info("rank %d of run %s: taken up at record %d", source.rank, run.run_id, source.acked_seq)
        return bool(new)

    def _died(self, source: Source) -> None:
        self._unwatch(source)
        self._house.set()

    def _unwatch(self, source: Source) -> None:
        if source.watch is not None and source.watch.pidfd is not None:
            asyncio.get_running_loop().remove_reader(source.watch.pidfd)

    def _forget(self, source: Source) -> None:
        self._unwatch(source)
        source.close()

    def _drop(self, source: Source) -> None:
        logger.warning("%s was removed by somebody else", source.directory)
        self._forget(source)
        del self.sources[source.rank]
        self._delivery.remove_source(source.rank)

    def _woken(self, wake_socket: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while wake_socket.recv(64):
                pass
        self._delivery.more.set()
        self._house.set()

    def _progressed(self, rank: int, num_records: int) -> None:
        self.num_sent[rank] += num_records
        self._progress_s = time.monotonic()
        self._house.set()

    def _terminate(self) -> None:
        # Batch systems send SIGTERM to everything at once: the trainer's own end is about to be news.
        self._terminate_s = min(self._terminate_s, time.monotonic() + _TERMINATE_S)

    def _is_over(self) -> bool:
        """Whether there is nothing more to do, or no more patience; sets `delivered`."""
        now_s = time.monotonic()
        sources = list(self.sources.values())
        if not sources:
            return now_s - self._started_s >= _FIRST_SOURCE_S or self._options.drain
        self.delivered = all(source.delivered for source in sources) and not self.disk_error
        if self.delivered and (self._options.drain or all(source.closed for source in sources)):
            return True
        if all(source.closed or not source.alive() for source in sources):
            self._ended_s = self._ended_s or now_s
        else:
            self._ended_s = None
        lingered = self._ended_s is not None and now_s - self._ended_s >= self._options.linger_s
        stuck = self._delivery.stopped or now_s - self._progress_s >= self._options.give_up_s
        given_up = self._options.drain and stuck
        ended_for_good = self._delivery.stopped and self._ended_s is not None
        return lingered or given_up or ended_for_good or now_s >= self._terminate_s

    def _leave(self) -> bool:
        """Tidy up at the end; False if a rank came at the last moment and the work goes on."""
        self._write_down(final=True)
        if not self.delivered or not all(source.closed for source in self.sources.values()):
            return True
        # From here on a new rank finds no lock and starts an uplink of its own, unless we see its folder first.
        self._lock.remove()
        if self._take_up_new_sources():
            self._lock.release()
            return not self._lock.acquire()
        for source in self.sources.values():
            shutil.rmtree(source.directory, ignore_errors=True)
        remove_empty_attempt(self._directory)
        return True

    def _write_down(self, *, final: bool = False) -> None:
        try:
            for source in self.sources.values():
                source.flush()
            state = self._state("done" if final and self.delivered else self._delivery.state)
            changed = self._last_state is None or (state.state, state.last_error) != (
                self._last_state.state,
                self._last_state.last_error,
            )
            if changed or final or time.monotonic() - self._state_written_s >= _STATE_S:
                self._state_written_s, self._last_state = time.monotonic(), state
                write_state(self._directory, state)
        except OSError as error:
            self._note_disk_error(f"cannot write in {self._directory}: {error.strerror or error}")

    def _note_disk_error(self, message: str) -> None:
        if message != self.disk_error:
            logger.error("%s", message)
        self.disk_error = message

    def _state(self, state: str) -> UplinkState:
        return UplinkState(
            pid=os.getpid(),
            url=self._url,
            state=state,
            transport=self._delivery.transport,
            last_error=self.last_error,
            acked={source.rank: source.acked_seq for source in self.sources.values()},
            spooled={source.rank: source.spooled_seq for source in self.sources.values()},
            rejected={source.rank: source.num_rejected for source in self.sources.values()},
            backlog_bytes=sum(source.stored_bytes() for source in self.sources.values()),
            updated_s=time.time(),
        )


def remove_empty_attempt(attempt_directory: Path) -> None:
    """Remove the folder of an attempt without sources, and its run's if that was the last; put back what a newcomer needs."""
    run_file = attempt_directory / "run.json"
    with contextlib.suppress(OSError):
        described = run_file.read_bytes()
        for path in attempt_directory.iterdir():
            if path.name in ("run.json", STATE, LOG, WAKE_SOCKET, f"{LOG}.1") or path.name.startswith("."):
                path.unlink(missing_ok=True)
        try:
            attempt_directory.rmdir()
        except OSError:
            spool.write_atomically(run_file, described)
            return
        attempt_directory.parent.rmdir()
