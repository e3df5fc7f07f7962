"""What agents are asked for: when a grave alert opens, once, and only while it is news."""

from __future__ import annotations

import dataclasses

from gradiometer import wire
from gradiometer_server.domain.alerts import Breach, Episode, EpisodeState, Severity
from gradiometer_server.domain.live import AlertUpdate, PointsUpdate, RunUpdate
from gradiometer_server.ingest.commands import FRESH_S, MAX_RANKS, POLLING_S, STALE_ALERT_S, CommandDesk
from gradiometer_server.ingest.pace import LEAD_S, MIN_LEAD_STEPS, Pace

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


def hello(*ranks: int, run: str = "r", commands: tuple[str, ...] = ("ring", "histogram")) -> wire.Hello:
    return wire.Hello(
        protocol=1, agent_version="test", run=wire.RunInfo(run_id=run, project="p", name="n", created_s=0.0),
        sources=tuple(wire.SourceInfo(rank=rank, attempt=1, world_size=9) for rank in ranks), commands=commands,
    )  # fmt: skip


def steps_of(seconds: float, *, last: int, run: str = "r", count: int = 5) -> PointsUpdate:
    points = [(last - count + 1 + index, seconds) for index in range(count)]
    return PointsUpdate(run_id=run, series={"time/step_s": points, "train/loss": [(last, 1.0)]})


def test_a_grave_alert_asks_all_ranks_for_histograms_of_one_step_that_is_still_to_come() -> None:
    desk = CommandDesk(FakeClock())
    desk.observe([steps_of(0.1, last=500), AlertUpdate(run_id="r", episode=episode(severity=Severity.ERROR))])
    (command,) = desk.recent("r", ("histogram",))
    assert (command.rank, command.step, command.on_alert) == (None, 500 + round(LEAD_S / 0.1), True)
    assert command.reason == "alert non_finite (error)"
    assert desk.recent("r", ("ring",))[0].on_alert is False


def test_who_asks_is_told_which_ranks_were_asked_and_none_if_nobody_is_there() -> None:
    desk = CommandDesk(clock := FakeClock())
    ask = lambda rank=None, kind="histogram": desk.ask("r", kind=kind, rank=rank, reason="look")  # noqa: E731
    assert ask() is None
    woken: list[int] = []
    wake = lambda: woken.append(1)  # noqa: E731
    desk.join("r", wake, hello(0, commands=("ring",)))
    desk.join("another", wake, hello(5, run="another"))
    assert ask() is None
    assert desk.recent("r", ("histogram",)) == ()
    desk.join("r", wake, hello(0, 1))
    desk.polled(hello(2))
    asked_all, asked_one = ask(), ask(2)
    assert asked_all is not None
    assert (asked_all.ranks, asked_all.step) == ((0, 1, 2), None)
    assert asked_one is not None
    assert asked_one.ranks == (2,)
    assert len(woken) == 2
    assert ask(3) is None
    assert ask(kind="dump") is None
    commands = desk.recent("r", ("histogram",))
    assert [(command.rank, command.reason) for command in commands] == [(None, "look"), (2, "look")]
    assert commands[0].id == asked_all.command_id != commands[1].id
    clock.now += POLLING_S + 1
    desk.leave("r", wake)
    assert ask() is None


def test_the_step_ahead_is_some_seconds_away_whatever_one_long_step_says() -> None:
    pace = Pace()
    assert pace.step_ahead("r") is None
    pace.observe(PointsUpdate(run_id="r", series={"train/loss": [(7, 1.0)]}))
    assert pace.step_ahead("r") is None
    pace.observe(steps_of(0.001, last=100))
    pace.observe(PointsUpdate(run_id="r", series={"time/step_s": [(101, 900.0), (102, float("nan"))]}))
    assert pace.step_ahead("r") == 102 + round(LEAD_S / 0.001)
    pace.observe(steps_of(60.0, last=9, run="slow"))
    assert pace.step_ahead("slow") == 9 + MIN_LEAD_STEPS
    # A restart from an earlier checkpoint counts from there.
    pace.observe(steps_of(0.001, last=50))
    assert pace.step_ahead("r") == 50 + round(LEAD_S / 0.001)
    for number in range(1500):
        pace.observe(steps_of(1.0, last=9, run=f"run{number}"))
    assert len(pace._runs) <= 1000
