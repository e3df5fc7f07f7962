"""What the server asks of agents: when a grave alert opens, its ranks' last steps in full detail.

The fold's threads tell the desk of alerts; every connection of the run is woken, and a POST or a new connection gets
what was asked in the last minute. A command may so arrive twice; agents remember the ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from gradiometer import wire
from gradiometer_server.clock import Clock
from gradiometer_server.domain.alerts import Episode, EpisodeState, Severity
from gradiometer_server.domain.live import AlertUpdate, LiveUpdate

FRESH_S: Final = 60.0
"""How long a command is given to connections that come later."""
STALE_ALERT_S: Final = 300.0
"""An alert about something longer ago (a backlog that was synced late) asks for nothing: the ring has moved on."""
MAX_RANKS: Final = 8
"""Ranks of one alert that are asked."""
_MAX_COMMANDS: Final = 32
_MAX_RUNS: Final = 1000
_MAX_ALERTS: Final = 10_000
_GRAVE: Final = (Severity.ERROR, Severity.CRITICAL)


class CommandDesk:
    """Commands by run. Thread-safe; wakes connections through callbacks that must not block."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._commands: OrderedDict[str, deque[tuple[float, wire.Command]]] = OrderedDict()
        self._wakers: dict[str, set[Callable[[], None]]] = {}

    def observe(self, updates: Sequence[LiveUpdate]) -> None:
        """Take what the fold publishes; a grave alert that was not seen before makes commands. Any thread."""
        for update in updates:
            if isinstance(update, AlertUpdate) and self._is_news(update.run_id, update.episode):
                self._ask(update.run_id, update.episode)

    def _is_news(self, run_id: str, episode: Episode) -> bool:
        if episode.severity not in _GRAVE or episode.state is not EpisodeState.FIRING:
            return False
        if self._clock.now_s() - episode.opened_s > STALE_ALERT_S:
            return False
        key = (run_id, episode.alert_id)
        with self._lock:
            if key in self._asked:
                return False
            self._asked[key] = None
            if len(self._asked) > _MAX_ALERTS:
                self._asked.popitem(last=False)
        return True

    def _ask(self, run_id: str, episode: Episode) -> None:
        ranks: tuple[int | None, ...] = episode.ranks[:MAX_RANKS] or (None,)
        reason = f"alert {episode.first.rule} ({episode.severity.value})"[: wire.MAX_REASON_CHARS]
        now_s = self._clock.now_s()
        with self._lock:
            known = self._commands.setdefault(run_id, deque(maxlen=_MAX_COMMANDS))
            self._commands.move_to_end(run_id)
            if len(self._commands) > _MAX_RUNS:
                self._commands.popitem(last=False)
            known.extend((now_s, command) for command in _commands_of(episode, ranks, reason))
            wakers = list(self._wakers.get(run_id, ()))
        for wake in wakers:
            wake()

    def recent(self, run_id: str, kinds: Sequence[str]) -> tuple[wire.Command, ...]:
        """Commands of the last minute of these kinds, oldest first."""
        oldest_s = self._clock.now_s() - FRESH_S
        with self._lock:
            return tuple(
                command
                for at_s, command in self._commands.get(run_id, ())
                if at_s >= oldest_s and command.kind in kinds
            )

    def join(self, run_id: str, wake: Callable[[], None]) -> None:
        """Call `wake` (from any thread) when there is a new command for this run."""
        with self._lock:
            self._wakers.setdefault(run_id, set()).add(wake)

    def leave(self, run_id: str, wake: Callable[[], None]) -> None:
        """Undo `join`."""
        with self._lock:
            wakers = self._wakers.get(run_id, set())
            wakers.discard(wake)
            if not wakers:
                self._wakers.pop(run_id, None)


def _commands_of(episode: Episode, ranks: Sequence[int | None], reason: str) -> list[wire.Command]:
    """The rings of these ranks and, if it is critical, a dump, which all ranks make together or none does."""
    wanted: list[tuple[str, int | None]] = [("ring", rank) for rank in ranks]
    if episode.severity is Severity.CRITICAL:
        wanted.append(("dump", None))
    return [
        wire.Command(
            id=f"{kind}-{episode.alert_id}-{'all' if rank is None else rank}",
            kind=kind,
            rank=rank,
            reason=reason,
            step=episode.first.step,
        )
        for kind, rank in wanted
    ]


class Courier:
    """Sends one connection the commands of its run, each once. Event loop only.

    Args:
        send: sends one message to the agent; may fail as a connection may.
    """

    def __init__(self, desk: CommandDesk, send: Callable[[wire.ServerMessage], Awaitable[None]]) -> None:
        self._desk, self._send = desk, send
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._run_id = ""

    def take_up(self, hello: wire.Hello) -> None:
        """The agent was welcomed; one that understands no command is left alone."""
        if self._task is not None or not hello.commands:
            return
        self._run_id = hello.run.run_id
        self._desk.join(self._run_id, self._wake)
        self._woken.set()
        self._task = asyncio.create_task(self._carry(tuple(hello.commands)), name="ingest-commands")

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):
            # The loop has ended, and with it the connection.
            self._loop.call_soon_threadsafe(self._woken.set)

    async def _carry(self, kinds: tuple[str, ...]) -> None:
        sent: deque[str] = deque(maxlen=2 * _MAX_COMMANDS)
        while True:
            await self._woken.wait()
            self._woken.clear()
            for command in self._desk.recent(self._run_id, kinds):
                if command.id not in sent:
                    sent.append(command.id)
                    await self._send(command)

    async def close(self) -> None:
        """The connection ends; what could not be sent is given to the next one."""
        if self._task is None:
            return
        self._desk.leave(self._run_id, self._wake)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
