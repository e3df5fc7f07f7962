"""The hub: from many threads to the right browsers, runs read at most twice a second, lost runs noticed."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gradiometer_server.clock import SystemClock
from gradiometer_server.domain.alerts import Breach, Episode, EpisodeState, Severity
from gradiometer_server.domain.live import AlertUpdate, LiveUpdate, MetricsUpdate, PointsUpdate, RunUpdate
from gradiometer_server.live.hub import MAX_INBOX, Browser, Hub
from gradiometer_server.live.states import StateWatcher


class Runs:
    """Stands for the store: counts how often each run is read."""

    def __init__(self) -> None:
        self.reads: dict[str, int] = {}
        self.fail = False
        self.failed_twice = asyncio.Event()

    async def read(self, run_id: str) -> dict[str, Any] | None:
        self.reads[run_id] = self.reads.get(run_id, 0) + 1
        if self.fail:
            if sum(self.reads.values()) == 2:
                self.failed_twice.set()
            raise OSError("the database is gone")
        return None if run_id == "deleted" else {"id": run_id}


@pytest.fixture
def runs() -> Runs:
    return Runs()


@pytest.fixture
async def hub(runs: Runs) -> AsyncIterator[Hub]:
    made = Hub(
        read_run=runs.read, show_alert=lambda run, episode: {"id": episode.alert_id}, clock=SystemClock()
    )
    made.start()
    yield made
    await made.stop()


def points(run: str, step: int = 1) -> PointsUpdate:
    return PointsUpdate(run_id=run, series={"loss": [(step, 0.5)]})


def episode(alert_id: str = "x") -> Episode:
    breach = Breach(rule="r", severity=Severity.ERROR, step=1, time_s=1.0, metric="m")
    return Episode(
        alert_id=alert_id, attempt=1, state=EpisodeState.FIRING, first=breach, worst=breach, opened_s=1.0, last_step=1,
        count=1, severity=Severity.ERROR, layers=(), num_layers=0, ranks=(), facts=(),
    )  # fmt: skip


async def next_messages(browser: Browser) -> list[Any]:
    """Wait until the hub wakes the browser's sender, and take what is pending."""
    async with asyncio.timeout(5):
        await browser.wake.wait()
    browser.wake.clear()
    # Points are paced by the time given here; at the end of time everything is due, each time again.
    return list(browser.queue.take(math.inf))


def watching(hub: Hub, *runs: str | None) -> Browser:
    browser = hub.connect()
    for run in runs:
        hub.subscribe(browser, run)
    return browser


async def test_updates_reach_those_who_watch_and_nobody_else(hub: Hub) -> None:
    first, second = watching(hub, "a"), watching(hub, "b")
    hub.publish([points("a"), MetricsUpdate(run_id="a")])
    assert [message["type"] for message in await next_messages(first)] == ["metrics", "points"]
    assert second.queue.wait_s(0.0) is None
    hub.unsubscribe(first, "a")
    hub.publish([points("a"), points("b")])
    assert [message["run"] for message in await next_messages(second)] == ["b"]
    assert first.queue.wait_s(0.0) is None


async def test_alerts_come_with_the_run_that_they_change(hub: Hub) -> None:
    page, runs_list = watching(hub, "a"), watching(hub, None)
    hub.publish([AlertUpdate(run_id="a", episode=episode())])
    found = await next_messages(page)
    while len(found) < 2:
        found += await next_messages(page)
    assert found == [{"type": "alert", "run": "a", "alert": {"id": "x"}}, {"type": "run", "run": {"id": "a"}}]
    assert await next_messages(runs_list) == [{"type": "run", "run": {"id": "a"}}]


async def test_a_run_is_read_at_most_twice_a_second_for_all_browsers_together(hub: Hub, runs: Runs) -> None:
    browsers = [watching(hub, None) for _ in range(5)]
    hub.publish([RunUpdate(run_id="a")])
    for browser in browsers:
        assert await next_messages(browser) == [{"type": "run", "run": {"id": "a"}}]
    for step in range(100):
        hub.publish([points("a", step), RunUpdate(run_id="a")])
    started_s = asyncio.get_running_loop().time()
    await next_messages(browsers[0])
    assert asyncio.get_running_loop().time() - started_s > 0.3
    assert runs.reads == {"a": 2}


async def test_nothing_is_read_for_runs_that_nobody_looks_at(hub: Hub, runs: Runs) -> None:
    browser = watching(hub, "b")
    hub.publish([RunUpdate(run_id="a"), points("a"), points("b")])
    await next_messages(browser)
    assert runs.reads == {}


async def test_a_failing_or_missing_read_does_not_end_the_feed(hub: Hub, runs: Runs) -> None:
    browser = watching(hub, "a", "deleted")
    runs.fail = True
    hub.publish([RunUpdate(run_id="a"), RunUpdate(run_id="deleted")])
    await next_messages(browser)
    await asyncio.wait_for(runs.failed_twice.wait(), 5)
    assert hub.num_failures >= 1
    runs.fail = False
    hub.publish([RunUpdate(run_id="a"), RunUpdate(run_id="deleted")])
    found: list[Any] = []
    while len(found) < 2:
        found += await next_messages(browser)
    assert {"type": "run", "run": {"id": "a"}} in found
    assert [(one["run"], one["reason"]) for one in found if one["type"] == "resync"] == [
        ("deleted", "run deleted was deleted")
    ]


async def test_many_threads_may_publish_at_once(hub: Hub) -> None:
    browser = watching(hub, "a")

    def work(start: int) -> None:
        for step in range(start, start + 500):
            hub.publish([points("a", step)])

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    steps: list[int] = []
    while len(steps) < 2000:
        for message in await next_messages(browser):
            steps += message["series"][0]["steps"]
    for thread in threads:
        thread.join(5)
    assert sorted(steps) == sorted(1000 * number + step for number in range(4) for step in range(500))


async def test_a_loop_that_falls_behind_drops_counts_and_says_so(hub: Hub) -> None:
    browser = watching(hub, "a", None)
    hub.publish([points("a", step) for step in range(MAX_INBOX)])
    hub.publish([points("a", MAX_INBOX)])
    messages = await next_messages(browser)
    assert {(message["type"], message["run"]) for message in messages} == {("resync", "a"), ("resync", None)}
    assert hub.num_dropped == MAX_INBOX + 1


async def test_publishing_before_the_start_and_after_the_stop_is_harmless(runs: Runs) -> None:
    hub = Hub(read_run=runs.read, show_alert=lambda run, episode: {}, clock=SystemClock())
    hub.publish([points("a")])
    hub.start()
    browser = watching(hub, "a")
    await hub.stop()
    hub.publish([points("a")])
    assert browser.queue.wait_s(0.0) is None


async def test_disconnecting_forgets_the_browser(hub: Hub) -> None:
    browser = watching(hub, "a", None)
    assert hub.num_browsers == 1
    hub.disconnect(browser)
    assert hub.num_browsers == 0


async def test_runs_that_fall_silent_or_come_back_are_published() -> None:
    published: list[LiveUpdate] = []
    running = frozenset({"a", "b"})

    async def read() -> frozenset[str]:
        return running

    watcher = StateWatcher(read_running=read, publish=published.extend)
    await watcher.look()
    assert published == []
    running = frozenset({"b", "c"})
    await watcher.look()
    assert published == [RunUpdate(run_id="a"), RunUpdate(run_id="c")]
    await watcher.look()
    assert len(published) == 2
