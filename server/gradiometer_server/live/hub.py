"""From the fold's threads to the browsers' queues: one hub per server, on the server's event loop.

`publish` is called by threads that fold, so it only appends to a bounded list and wakes the loop once per batch. What
a run looks like is read from the store at most twice a second per run, once for all browsers together.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from gradiometer_server.clock import Clock
from gradiometer_server.domain.alerts import Episode
from gradiometer_server.domain.live import AlertUpdate, LiveUpdate, MetricsUpdate, PointsUpdate, RunUpdate
from gradiometer_server.live.queue import BrowserQueue

logger = logging.getLogger(__name__)

MAX_INBOX: Final = 20_000
"""Updates that may wait for the event loop; beyond it all are dropped and every browser resyncs."""
RUN_INTERVAL_S: Final = 0.5

ReadRun = Callable[[str], Awaitable[dict[str, Any] | None]]
ShowAlert = Callable[[str, Episode], dict[str, Any]]


class Browser:
    """One connection: what it watches, what it is still owed, and how to wake its sender."""

    def __init__(self) -> None:
        self.queue = BrowserQueue()
        self.runs: set[str | None] = set()
        self.wake = asyncio.Event()


class Hub:
    """Fans updates out to the browsers that watch their run.

    Args:
        read_run: reads the public form of a run (None: it is gone); must not block the loop.
        show_alert: public form of an episode; pure.
        clock: for intervals.
    """

    def __init__(self, *, read_run: ReadRun, show_alert: ShowAlert, clock: Clock) -> None:
        self._read_run, self._show_alert, self._clock = read_run, show_alert, clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._inbox: list[LiveUpdate] = []
        self._woken = False
        self._overflowed = False
        self._watchers: defaultdict[str | None, set[Browser]] = defaultdict(set)
        self._dirty: dict[str, None] = {}
        self._dirty_wake = asyncio.Event()
        self._read_at_s: dict[str, float] = {}
        self._refresher: asyncio.Task[None] | None = None
        self.num_dropped = 0
        self.num_failures = 0

    # ------------------------------------------------------------------------------------ from any thread

    def publish(self, updates: Sequence[LiveUpdate]) -> None:
        """Hand updates over; returns at once, never raises, and may be called from any thread at any time.

        Hot path: called for every fold. It must not wait for the loop, nor look at browsers.
        """
        with self._lock:
            if self._loop is None or not updates or not self._watchers:
                return
            if len(self._inbox) + len(updates) > MAX_INBOX:
                self.num_dropped += len(self._inbox) + len(updates)
                self._inbox.clear()
                self._overflowed = True
            else:
                self._inbox.extend(updates)
            if self._woken:
                return
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    # ------------------------------------------------------------------------------------ on the event loop

    def start(self) -> None:
        """Begin to deliver on the running event loop."""
        self._refresher = asyncio.create_task(self._refresh_forever(), name="live-runs")
        with self._lock:
            self._loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        """Deliver nothing more; `publish` becomes a no-op."""
        with self._lock:
            self._loop = None
            self._inbox.clear()
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)

    def connect(self) -> Browser:
        """A browser that watches nothing yet."""
        return Browser()

    def disconnect(self, browser: Browser) -> None:
        """Forget a browser."""
        for run_id in list(browser.runs):
            self.unsubscribe(browser, run_id)

    def subscribe(self, browser: Browser, run_id: str | None) -> None:
        """From now on `browser` is told about a run, or (None) about the state of all runs."""
        browser.runs.add(run_id)
        self._watchers[run_id].add(browser)

    def unsubscribe(self, browser: Browser, run_id: str | None) -> None:
        """Undo `subscribe`; what is pending for that run is dropped."""
        browser.runs.discard(run_id)
        watchers = self._watchers[run_id]
        watchers.discard(browser)
        if not watchers:
            del self._watchers[run_id]
        if run_id is not None:
            browser.queue.forget(run_id)

    @property
    def num_browsers(self) -> int:
        """Browsers that watch something."""
        return len({browser for watchers in self._watchers.values() for browser in watchers})

    def _deliver(self) -> None:
        with self._lock:
            updates, self._inbox = self._inbox, []
            overflowed, self._overflowed = self._overflowed, False
            self._woken = False
        if overflowed:
            self._resync_all()
        touched: set[Browser] = set()
        for update in updates:
            touched |= self._dispatch(update)
        for browser in touched:
            browser.wake.set()
        if self._dirty:
            self._dirty_wake.set()

    def _resync_all(self) -> None:
        logger.warning("the event loop fell behind: %d live updates dropped so far", self.num_dropped)
        for browser in {browser for watchers in self._watchers.values() for browser in watchers}:
            browser.queue.overflow(tuple(browser.runs), "the server did not keep up")
            browser.wake.set()

    def _dispatch(self, update: LiveUpdate) -> set[Browser]:
        watchers = self._watchers.get(update.run_id, set())
        if isinstance(update, PointsUpdate):
            for browser in watchers:
                browser.queue.add_points(update)
        elif isinstance(update, AlertUpdate):
            self._add_alert(update, watchers)
        elif isinstance(update, MetricsUpdate):
            for browser in watchers:
                browser.queue.add(("metrics", update.run_id), {"type": "metrics", "run": update.run_id})
        if not isinstance(update, MetricsUpdate):
            self._mark_dirty(update, watchers)
        return watchers

    def _add_alert(self, update: AlertUpdate, watchers: set[Browser]) -> None:
        if not watchers:
            return
        alert = self._show_alert(update.run_id, update.episode)
        message = {"type": "alert", "run": update.run_id, "alert": alert}
        for browser in watchers:
            browser.queue.add(("alert", update.run_id, update.episode.alert_id), message)

    def _mark_dirty(self, update: LiveUpdate, watchers: set[Browser]) -> None:
        # Points change the last step and the latest values that the runs list shows; a page that shows the run
        # itself takes them from the points.
        list_open = None in self._watchers
        if list_open or (watchers and isinstance(update, RunUpdate | AlertUpdate)):
            self._dirty[update.run_id] = None

    async def _refresh_forever(self) -> None:
        while True:
            await self._dirty_wake.wait()
            self._dirty_wake.clear()
            while self._dirty:
                await self._refresh_due()

    async def _refresh_due(self) -> None:
        now_s = self._clock.monotonic_s()
        due = [run_id for run_id in self._dirty if self._read_at_s.get(run_id, 0.0) + RUN_INTERVAL_S <= now_s]
        if not due:
            oldest_s = min(self._read_at_s[run_id] for run_id in self._dirty)
            await asyncio.sleep(max(0.01, oldest_s + RUN_INTERVAL_S - now_s))
            return
        for run_id in due:
            del self._dirty[run_id]
            self._read_at_s[run_id] = now_s
            await self._refresh(run_id)
        self._read_at_s = {key: at_s for key, at_s in self._read_at_s.items() if at_s + 60 > now_s}

    async def _refresh(self, run_id: str) -> None:
        try:
            run = await self._read_run(run_id)
        except Exception as error:  # noqa: BLE001 - worker loop: a failing database must not end the feed
            self.num_failures += 1
            logger.warning(
                "cannot read a run for the live feed (%d times so far): %s", self.num_failures, error
            )
            return
        if run is None:
            self._tell_gone(run_id)
            return
        message = {"type": "run", "run": run}
        for browser in self._watchers.get(run_id, set()) | self._watchers.get(None, set()):
            browser.queue.add(("run", run_id), message)
            browser.wake.set()

    def _tell_gone(self, run_id: str) -> None:
        """Who shows a run that was deleted, or the list with it, has to read again."""
        for about in (run_id, None):
            message = {"type": "resync", "run": about, "reason": f"run {run_id} was deleted"}
            for browser in self._watchers.get(about, set()):
                browser.queue.add(("resync", about), message)
                browser.wake.set()
