"""What agents are asked for: when a grave alert opens, once, and only while it is news."""

from __future__ import annotations

import dataclasses

from gradiometer import wire
from gradiometer_server.domain.alerts import Breach, Episode, EpisodeState, Severity
from gradiometer_server.domain.live import AlertUpdate, RunUpdate
from gradiometer_server.ingest.commands import FRESH_S, MAX_RANKS, STALE_ALERT_S, CommandDesk

ALL = ("ring", "dump")


class FakeClock:
    now = 1_000_000.0

    def now_s(self) -> float:
        return self.now

    def monotonic_s(self) -> float:
        return self.now


def episode(name: str = "a", **changes: object) -> Episode:
    first = Breach(
        rule="non_finite", severity=Severity.CRITICAL, step=7, time_s=1_000_000.0, metric="grad/norm"
    )
    made = Episode(
        alert_id=name, attempt=1, state=EpisodeState.FIRING, first=first, worst=first, opened_s=1_000_000.0,
        last_step=7, count=1, severity=Severity.CRITICAL, layers=(), num_layers=0, ranks=(3,), facts=(),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def desk_with(*episodes: Episode) -> CommandDesk:
    desk = CommandDesk(FakeClock())
    desk.observe([RunUpdate(run_id="r"), *(AlertUpdate(run_id="r", episode=one) for one in episodes)])
    return desk


def asked(desk: CommandDesk, run: str = "r") -> list[tuple[str, int | None]]:
    return [(command.kind, command.rank) for command in desk.recent(run, ALL)]


def test_a_critical_alert_asks_its_ranks_for_their_rings_and_all_for_a_dump() -> None:
    desk = desk_with(episode(ranks=(3, 1)))
    assert asked(desk) == [("ring", 3), ("ring", 1), ("dump", None)]
    command = desk.recent("r", ("ring",))[0]
    assert command == wire.Command(
        id="ring-a-3", kind="ring", rank=3, reason="alert non_finite (critical)", step=7
    )
    assert asked(desk, "another run") == []
    assert desk.recent("r", ()) == ()


def test_an_alert_that_grows_asks_once_and_one_that_becomes_grave_asks_then() -> None:
    mild = episode(severity=Severity.WARNING)
    assert asked(desk_with(mild)) == []
    desk = desk_with(mild, episode(severity=Severity.ERROR), episode(count=2), episode(count=3))
    assert asked(desk) == [("ring", 3)]


def test_resolved_and_old_alerts_ask_for_nothing() -> None:
    long_ago = episode("b", opened_s=1_000_000.0 - STALE_ALERT_S - 1)
    assert asked(desk_with(episode(state=EpisodeState.RESOLVED), long_ago)) == []


def test_ranks_are_bounded_and_an_alert_without_ranks_is_about_all() -> None:
    assert len(asked(desk_with(episode(ranks=tuple(range(100)))))) == MAX_RANKS + 1
    assert asked(desk_with(episode(ranks=(), severity=Severity.ERROR))) == [("ring", None)]


def test_commands_are_given_for_a_minute_and_connections_are_woken() -> None:
    desk = CommandDesk(clock := FakeClock())
    woken: list[int] = []
    wake = lambda: woken.append(1)  # noqa: E731
    desk.join("r", wake)
    desk.observe([AlertUpdate(run_id="r", episode=episode())])
    desk.leave("r", wake)
    desk.observe([AlertUpdate(run_id="r", episode=episode("later"))])
    assert len(woken) == 1
    assert len(asked(desk)) == 4
    clock.now += FRESH_S + 1
    assert asked(desk) == []


def test_what_is_remembered_is_bounded() -> None:
    desk = desk_with(*(episode(str(number)) for number in range(200)))
    assert len(asked(desk)) <= 32
    for number in range(1500):
        desk.observe([AlertUpdate(run_id=f"run{number}", episode=episode())])
    assert len(desk._commands) <= 1000
