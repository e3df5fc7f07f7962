"""The composition root: builds the application from settings, and starts and stops its parts in order.

Start: database (lock, migrations) -> live hub -> fold (takes in what is left in the log) -> log -> agents are let in.
Stop: the reverse. The connections are closed by then (`serving`), so nothing new comes in; the log commits what is
queued, the fold folds and flushes it, each with a deadline. What a deadline cuts off is in the log or in the spools.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import anyio.to_thread
from fastapi import APIRouter, FastAPI

from gradiometer import wire
from gradiometer_server import __version__
from gradiometer_server.api import problems
from gradiometer_server.api.alerts import alerts_router
from gradiometer_server.api.auth import AuthMiddleware, Sessions
from gradiometer_server.api.docs import docs_router
from gradiometer_server.api.edits import edits_router
from gradiometer_server.api.health import health_router
from gradiometer_server.api.histogram_reads import HistogramReads
from gradiometer_server.api.histograms import commands_router, histograms_router
from gradiometer_server.api.housekeeping import housekeeping_router
from gradiometer_server.api.layers import layers_router
from gradiometer_server.api.page import page
from gradiometer_server.api.paths import PathMiddleware
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.requests import RequestMiddleware
from gradiometer_server.api.ring import ring_router
from gradiometer_server.api.ring_reads import RingReads
from gradiometer_server.api.runs import runs_router
from gradiometer_server.api.security import (
    SecurityMiddleware,
    allowed_hosts,
    content_security_policy,
    read_index,
)
from gradiometer_server.api.series import series_router
from gradiometer_server.api.series_reads import SeriesReads
from gradiometer_server.api.summaries import SummaryReads, summaries_router
from gradiometer_server.api.views import alert_view
from gradiometer_server.clock import Clock, SystemClock
from gradiometer_server.domain.live import LiveUpdate
from gradiometer_server.errors import NotFound, StoreUnavailable
from gradiometer_server.fold.pipeline import FoldPipeline
from gradiometer_server.housekeeping.changes import RunChanges
from gradiometer_server.housekeeping.keeper import Keeper
from gradiometer_server.ingest.commands import CommandDesk
from gradiometer_server.ingest.deleted import DeletedRuns
from gradiometer_server.ingest.endpoint import ingest_router
from gradiometer_server.ingest.services import IngestServices
from gradiometer_server.ingest.tally import Tally
from gradiometer_server.live.endpoint import live_router
from gradiometer_server.live.hub import Hub
from gradiometer_server.live.states import StateWatcher
from gradiometer_server.settings import Settings
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.log import LogWriter

logger = logging.getLogger(__name__)

LOG_STOP_S: Final = 4.0
KEEPER_STOP_S: Final = 2.0
FOLD_STOP_S: Final = 6.0
"""For each of the fold's threads; all deadlines together stay below `serving.STOP_DEADLINE_S`."""
API_PREFIX: Final = "/api/v1"
_DESCRIPTION: Final = (
    "Runs, metrics, layer statistics and alerts of PyTorch training runs. A float that is not finite is the string "
    "NaN, Infinity or -Infinity; null means absent. Times are Unix seconds. The live feed is the WebSocket "
    "/api/v1/live; agents speak msgpack to /api/v1/ingest."
)


def create_app(settings: Settings, clock: Clock | None = None) -> FastAPI:
    """The application. Nothing is opened before its lifespan begins.

    The lifespan raises `ConfigurationError` when the database cannot be used.
    """
    parts = _Parts(settings, clock or SystemClock())
    app = FastAPI(
        title="Gradiometer",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=parts.lifespan,
        servers=[{"url": settings.path_prefix or "/"}],
        responses={"default": {"model": problems.Problem, "description": "what was wrong, and the remedy"}},
    )
    _add_routes(app, parts)
    problems.install(app)
    _add_middleware(app, settings, parts.clock)
    return app


class _Parts:
    """What lives as long as the server."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings, self.clock = settings, clock
        self.reads = Reads(clock)
        self.hub = Hub(read_run=self._read_run, show_alert=alert_view, clock=clock)
        self.tally = Tally()
        self.commands = CommandDesk(clock)
        self.deleted = DeletedRuns()
        self._keeper: Keeper | None = None
        self._pipeline: FoldPipeline | None = None
        self.changes = RunChanges(
            database=lambda: self.reads.database,
            clock=clock,
            forget=self._forget,
            deleted=self.deleted.note,
            publish=self.hub.publish,
            purge=lambda: self.keeper().purge_soon(),
        )
        self.states = StateWatcher(read_running=self._read_running, publish=self.hub.publish)
        self._ingest: IngestServices | None = None
        self._live_limiter = anyio.CapacityLimiter(2)

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """Start everything, serve, stop everything."""
        anyio.to_thread.current_default_thread_limiter().total_tokens = self.settings.read_threads
        async with contextlib.AsyncExitStack() as stack:
            database = await anyio.to_thread.run_sync(
                lambda: open_database(self.settings.database_url, clock=self.clock)
            )
            stack.callback(database.close)
            self.hub.start()
            stack.push_async_callback(self.hub.stop)
            await self._start_ingest(database, stack)
            self.states.start()
            stack.push_async_callback(self.states.stop)
            yield

    async def _start_ingest(self, database: Database, stack: contextlib.AsyncExitStack) -> None:
        pipeline = FoldPipeline(database, clock=self.clock, publish=self._publish)
        await anyio.to_thread.run_sync(pipeline.start)
        stack.push_async_callback(anyio.to_thread.run_sync, pipeline.stop, FOLD_STOP_S)
        log = LogWriter(database, call_soon=asyncio.get_running_loop().call_soon_threadsafe)
        log.start()
        stack.push_async_callback(anyio.to_thread.run_sync, log.stop, LOG_STOP_S)
        self.reads.open(database, tails=pipeline.tails, latest=pipeline.latest, last_step=pipeline.last_step)
        self._ingest = IngestServices(
            database=database,
            log=log,
            pipeline=pipeline,
            clock=self.clock,
            publish=self.hub.publish,
            server_version=__version__,
            tally=self.tally,
            commands=self.commands,
            deleted=self.deleted,
        )
        self._pipeline = pipeline
        self._keeper = Keeper(
            database,
            retention=self.settings.retention,
            clock=self.clock,
            delete=lambda run_id: self.changes.delete(run_id, force=False),
        )
        self._keeper.start()
        stack.push_async_callback(anyio.to_thread.run_sync, self._keeper.stop, KEEPER_STOP_S)

    def keeper(self) -> Keeper:
        """Who keeps house; raises `StoreUnavailable` before the start is done."""
        if self._keeper is None:
            raise _starting()
        return self._keeper

    def _forget(self, run_key: int, deadline_s: float) -> bool:
        if self._pipeline is None:
            raise _starting()
        return self._pipeline.forget(run_key, deadline_s)

    def _publish(self, updates: Sequence[LiveUpdate]) -> None:
        self.hub.publish(updates)
        self.commands.observe(updates)

    def ingest(self) -> IngestServices:
        """What agents talk to; raises `StoreUnavailable` before the start is done."""
        if self._ingest is None:
            raise _starting()
        return self._ingest

    async def _read_run(self, run_id: str) -> dict[str, Any] | None:
        # Threads of its own: a crowd of slow REST reads must not hold up the feed.
        try:
            return await anyio.to_thread.run_sync(self.reads.run, run_id, limiter=self._live_limiter)
        except NotFound:
            return None

    async def _read_running(self) -> frozenset[str]:
        return await anyio.to_thread.run_sync(self.reads.running, limiter=self._live_limiter)


def _starting() -> StoreUnavailable:
    return StoreUnavailable("the server is starting.", remedy="Try again in a moment.")


def _add_routes(app: FastAPI, parts: _Parts) -> None:
    api = APIRouter(prefix=API_PREFIX)
    api.include_router(runs_router(parts.reads))
    api.include_router(edits_router(parts.reads, parts.changes))
    api.include_router(housekeeping_router(parts.keeper))
    api.include_router(summaries_router(SummaryReads(parts.reads)))
    api.include_router(alerts_router(parts.reads))
    series_reads = SeriesReads(parts.reads)
    api.include_router(series_router(parts.reads, series_reads))
    api.include_router(layers_router(series_reads))
    api.include_router(ring_router(RingReads(parts.reads)))
    api.include_router(histograms_router(HistogramReads(parts.reads)))
    api.include_router(commands_router(parts.reads, parts.commands))
    api.include_router(ingest_router(parts.ingest), tags=["agents"])
    api.include_router(live_router(parts.hub, parts.clock))
    app.include_router(api)
    app.include_router(health_router(parts.reads.check_ready, parts.tally.counts))
    app.include_router(docs_router(app, parts.settings.path_prefix))
    # Whatever no route answers is the page's; the router asks it last, so a wrong method is still a 405.
    app.router.default = page(parts.settings.static_dir)


def _add_middleware(app: FastAPI, settings: Settings, clock: Clock) -> None:
    # The last one added sees a request first.
    app.add_middleware(
        problems.ProblemMiddleware,
        ingest_path=f"{API_PREFIX}/ingest",
        max_ingest_bytes=wire.MAX_MESSAGE_BYTES,
    )
    app.add_middleware(RequestMiddleware)
    if settings.token is not None:
        app.add_middleware(
            AuthMiddleware, sessions=Sessions(settings.token, clock), path_prefix=settings.path_prefix
        )
    app.add_middleware(PathMiddleware, prefix=settings.path_prefix)
    app.add_middleware(
        SecurityMiddleware,
        hosts=allowed_hosts(settings.host, settings.allowed_hosts),
        policy=content_security_policy(read_index(settings.static_dir)),
    )
