"""What the server asks of agents: when a grave alert opens, its ranks' last steps in full detail, and histograms.

The fold's threads tell the desk of alerts; every connection of the run is woken, and a POST or a new connection gets
what was asked in the last minute. A command may so arrive twice; agents remember the ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gradiometer import wire
from gradiometer_server.clock import Clock
from gradiometer_server.domain.alerts import Episode, EpisodeState, Severity
from gradiometer_server.domain.commands import Asked
from gradiometer_server.domain.live import AlertUpdate, LiveUpdate, PointsUpdate
from gradiometer_server.ingest.pace import Pace

FRESH_S: Final = 60.0
"""How long a command is given to connections that come later."""
STALE_ALERT_S: Final = 300.0
"""An alert about something longer ago (a backlog that was synced late) asks for nothing: the ring has moved on."""
POLLING_S: Final = 30.0
"""An agent that can only POST counts as there for so long after the last one."""
MAX_RANKS: Final = 8
"""Ranks of one alert that are asked."""
_MAX_COMMANDS: Final = 32
_MAX_RUNS: Final = 1000
_MAX_ALERTS: Final = 10_000
_GRAVE: Final = (Severity.ERROR, Severity.CRITICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Agent:
    """Somebody who takes commands: which kinds, for which ranks, and until when (of `Clock.now_s`)."""

    kinds: frozenset[str]
    ranks: frozenset[int]
    until_s: float

    @classmethod
    def of(cls, hello: wire.Hello, until_s: float = float("inf")) -> _Agent:
        """Who said hello."""
        ranks = frozenset(source.rank for source in hello.sources)
        return cls(kinds=frozenset(hello.commands), ranks=ranks, until_s=until_s)


class CommandDesk:
    """Commands by run. Thread-safe; wakes connections through callbacks that must not block."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._commands: OrderedDict[str, deque[tuple[float, wire.Command]]] = OrderedDict()
        self._wakers: dict[str, dict[Callable[[], None], _Agent | None]] = {}
        self._polling: OrderedDict[tuple[str, frozenset[int]], _Agent] = OrderedDict()
        self._pace = Pace()

    def observe(self, updates: Sequence[LiveUpdate]) -> None:
        """Take what the fold publishes; a grave alert that was not seen before makes commands. Any thread."""
        for update in updates:
            if isinstance(update, PointsUpdate):
                with self._lock:
                    self._pace.observe(update)
            elif isinstance(update, AlertUpdate) and self._is_news(update.run_id, update.episode):
                self._ask_for(update.run_id, update.episode)

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

    def _ask_for(self, run_id: str, episode: Episode) -> None:
        ranks: tuple[int | None, ...] = episode.ranks[:MAX_RANKS] or (None,)
        reason = f"alert {episode.first.rule} ({episode.severity.value})"[: wire.MAX_REASON_CHARS]
        with self._lock:
            step = self._pace.step_ahead(run_id)
        histogram = wire.Command(
            id=f"histogram-{episode.alert_id}", kind="histogram", reason=reason, step=step, on_alert=True
        )
        self._send(run_id, [*_commands_of(episode, ranks, reason), histogram])

    def ask(self, run_id: str, *, kind: str, rank: int | None, reason: str) -> Asked | None:
        """Ask the agents of a run that are there, or one rank; who connects within a minute is asked too. Any thread.

        Returns:
            What was asked; None if nobody is there who understands it, and nothing was.
        """
        with self._lock:
            step = self._pace.step_ahead(run_id)
            ranks = self._ranks_there(run_id, kind)
        if rank is not None:
            ranks &= {rank}
        if not ranks:
            return None
        command = wire.Command(
            id=f"{kind}-asked-{uuid.uuid4().hex[:12]}", kind=kind, rank=rank, reason=reason, step=step
        )
        self._send(run_id, [command])
        return Asked(command_id=command.id, step=step, ranks=tuple(sorted(ranks)))

    def _ranks_there(self, run_id: str, kind: str) -> frozenset[int]:
        now_s = self._clock.now_s()
        connected = list(self._wakers.get(run_id, {}).values())
        polling = [agent for (of_run, _), agent in self._polling.items() if of_run == run_id]
        there = [agent for agent in connected + polling if agent is not None]
        return frozenset(
            rank for agent in there if kind in agent.kinds and agent.until_s >= now_s for rank in agent.ranks
        )

    def _send(self, run_id: str, commands: Sequence[wire.Command]) -> None:
        now_s = self._clock.now_s()
        with self._lock:
            known = self._commands.setdefault(run_id, deque(maxlen=_MAX_COMMANDS))
            self._commands.move_to_end(run_id)
            if len(self._commands) > _MAX_RUNS:
                self._commands.popitem(last=False)
            known.extend((now_s, command) for command in commands)
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

    def join(self, run_id: str, wake: Callable[[], None], hello: wire.Hello | None = None) -> None:
        """Call `wake` (from any thread) when there is a new command for this run; `hello`: who is woken."""
        with self._lock:
            self._wakers.setdefault(run_id, {})[wake] = None if hello is None else _Agent.of(hello)

    def polled(self, hello: wire.Hello) -> None:
        """An agent that can only POST has asked for its commands; it is there until it stays away for a while."""
        agent = _Agent.of(hello, self._clock.now_s() + POLLING_S)
        with self._lock:
            self._polling[hello.run.run_id, agent.ranks] = agent
            self._polling.move_to_end((hello.run.run_id, agent.ranks))
            if len(self._polling) > _MAX_RUNS:
                self._polling.popitem(last=False)

    def leave(self, run_id: str, wake: Callable[[], None]) -> None:
        """Undo `join`."""
        with self._lock:
            wakers = self._wakers.get(run_id, {})
            wakers.pop(wake, None)
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
        # One object: a bound method is made anew each time it is named.
        self._wake_up = self._wake

    def take_up(self, hello: wire.Hello) -> None:
        """The agent was welcomed; one that understands no command is left alone."""
        if not hello.commands:
            return
        self._run_id = hello.run.run_id
        # Again when another rank of the node has appeared.
        self._desk.join(self._run_id, self._wake_up, hello)
        if self._task is not None:
            return
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
        self._desk.leave(self._run_id, self._wake_up)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
