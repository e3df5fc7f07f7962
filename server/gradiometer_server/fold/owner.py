"""One run in the hands of its one owner: folds records, shows what is new, judges it, stores it.

Everything here can be thrown away at any moment and loaded again: records are in the log, and what they led to is
written under the same keys a second time. So a failure never needs to be repaired halfway; the pipeline drops the
owner and loads a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from sqlalchemy import Connection

from gradiometer import wire
from gradiometer_server.clock import Clock
from gradiometer_server.domain.alerts import Episode
from gradiometer_server.domain.folded import Folded, FoldedEvent, Layout
from gradiometer_server.domain.live import AlertUpdate, LiveUpdate, MetricsUpdate, RunUpdate
from gradiometer_server.domain.series import Tail
from gradiometer_server.errors import GradiometerError
from gradiometer_server.fold.batch import Batch
from gradiometer_server.fold.judge import Judge
from gradiometer_server.fold.points import live_points, points_of
from gradiometer_server.fold.run_fold import RunFold
from gradiometer_server.fold.stored import (
    LoadedRun,
    LoadedSource,
    OwnerMemory,
    load_run,
    load_source,
    states_to_store,
)
from gradiometer_server.fold.tail_set import TailSet
from gradiometer_server.store import alerts, chunks, log, runs
from gradiometer_server.store.database import Database
from gradiometer_server.store.definitions import define_metric
from gradiometer_server.store.details import SourceDetail, add_details
from gradiometer_server.store.dumps import add_dump
from gradiometer_server.store.series import ensure_layout

logger = logging.getLogger(__name__)

Publish = Callable[[Sequence[LiveUpdate]], None]
"""Takes updates to the live feed; thread-safe, never waits."""

FLUSH_STEPS: Final = 256
FLUSH_BYTES: Final = 1024 * 1024
FLUSH_SERIES_BYTES: Final = 2048
"""A flush costs by the series, not by the byte: a run of 10,000 metrics would otherwise flush every few steps."""
MAX_FLUSH_BYTES: Final = 32 * 1024 * 1024
FLUSH_EVERY_S: Final = 2.0
"""A fast run flushes by bytes: many small flushes would write the same open chunks again and again."""
FLUSH_LOG_BYTES: Final = 128 * 1024 * 1024
"""Of records in the log that a flush would end: many ranks send much that becomes little."""
FLUSH_IDLE_S: Final = 10.0
UNLOAD_IDLE_S: Final = 60.0
_LATE: Final = "a rank reported a step so late that it could not be merged with the others any more"
_TOO_MUCH_DETAIL: Final = "a rank sent more steps in full detail than a run may keep"
_NO_DEFINITION: Final = "a definition of a metric is not valid, or is one too many"
_REPLAY_BYTES: Final = 1024 * 1024
"""Read at once of one source: ranks are read in turns, so that none gets far ahead of the others."""


class RunOwner:
    """Not thread-safe, but `tails` and `latest` may be called from any thread."""

    def __init__(self, *, database: Database, clock: Clock, run_key: int, publish: Publish) -> None:
        """Load a run from the store and fold what is left in its log.

        Raises:
            StoreUnavailable: the database does not answer.
            NotFound: there is no such run.
        """
        self._database, self._clock, self._run_key, self._publish = database, clock, run_key, publish
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._fold = RunFold(make_layout=self._make_layout)
        loaded = load_run(database, run_key)
        self._run_id = loaded.run_id
        self._source_ids: dict[tuple[int, int], int] = {}
        self._tails = TailSet(database, run_key, loaded.series)
        self._judge = Judge(loaded.rule_states, loaded.memory.episodes)
        self._dropped = dict(loaded.memory.dropped)
        self._exceptions: dict[int, str] = {}
        self._flushed: Mapping[int, int] = {one.spec.source_id: one.spec.folded_seq for one in loaded.sources}
        self._seen_late = 0
        self._touched_s = clock.monotonic_s()
        self._flushed_s = -FLUSH_EVERY_S
        self._log_bytes = 0
        for layout in loaded.layouts:
            self._layouts[layout.names] = layout
        self._join(loaded.sources)
        self._replay(loaded)

    def _join(self, sources: Sequence[LoadedSource]) -> None:
        now_s = self._clock.monotonic_s()
        for source in sources:
            if not self._fold.knows(source.spec.source_id):
                self._fold.add_source(source.spec, now_s)
                self._source_ids[source.spec.ordinal, source.spec.rank] = source.spec.source_id
                for record in source.schemas:
                    self._fold.declare(source.spec.source_id, record)

    def _replay(self, loaded: LoadedRun) -> None:
        """Fold the log: first what the rules have seen already, silently, then the rest.

        Only with that order does every rule see every value once: what was shown before the flush needed no record
        beyond those.
        """
        self._fold.restore(loaded.memory.fold)
        seen = loaded.memory.fold.applied
        self._read_log(seen, muted=True)
        # A frame that is read again for one of its steps holds others that were merged and forgotten: not late.
        self._seen_late = self._fold.num_late
        self._read_log(dict.fromkeys(self._source_ids.values(), 2**62), muted=False)
        for source in loaded.sources:
            # Refused records are acknowledged but not in the log.
            self._fold.skip_to(source.spec.source_id, source.acked_seq)

    def _read_log(self, until: Mapping[int, int], *, muted: bool) -> None:
        open_sources = {source_id for source_id in self._source_ids.values() if source_id in until}
        while open_sources:
            for source_id in sorted(open_sources):
                entries = self._read_page(source_id, until[source_id])
                if entries:
                    self._apply(source_id, entries, entries[-1][0], muted=muted)
                else:
                    open_sources.discard(source_id)

    def _read_page(self, source_id: int, until: int) -> list[tuple[int, wire.Record]]:
        after = self._fold.applied_seq(source_id)
        with self._database.read() as conn:
            rows = log.read_frames(conn, self._run_key, source_id, after, _REPLAY_BYTES)
        return [(seq, wire.decode_record(data)) for seq, data in rows if seq <= until]

    def take(self, batch: Batch) -> None:
        """Fold a batch and show what came of it; what was folded already changes nothing."""
        if not self._fold.knows(batch.source_id):
            self._join([load_source(self._database, self._run_key, batch.source_id)])
        if batch.first_seq > self._fold.applied_seq(batch.source_id) + 1:
            # An earlier batch never arrived here; the log has it.
            self._read_log({batch.source_id: batch.first_seq - 1}, muted=False)
        self._log_bytes += batch.num_bytes
        self._apply(batch.source_id, batch.entries, batch.last_seq, muted=False)

    def _apply(
        self, source_id: int, entries: Sequence[tuple[int, wire.Record]], last_seq: int, *, muted: bool
    ) -> None:
        now_s = self._clock.monotonic_s()
        items: list[Folded] = []
        for seq, record in entries:
            items += self._apply_one(source_id, seq, record, now_s)
        self._fold.skip_to(source_id, last_seq)
        self._touched_s = now_s
        details = [(source_id, seq, record) for seq, record in entries if isinstance(record, wire.Detail)]
        self._show(items, muted=muted, details=details)

    def _apply_one(self, source_id: int, seq: int, record: wire.Record, now_s: float) -> list[Folded]:
        try:
            return self._fold.apply(source_id, seq, record, now_s)
        except GradiometerError:
            raise
        except Exception:
            logger.exception("run %s, source %d: record %d could not be folded", self._run_id, source_id, seq)
            with self._database.write() as conn:
                runs.count_rejected(
                    conn, self._run_key, 1, f"record {seq} could not be folded (see server log)"
                )
            return []

    def tick(self) -> None:
        """Show what has become ready by time alone; store what is due."""
        items = self._fold.tick(self._clock.monotonic_s())
        if items:
            self._show(items, muted=False)
        if self.flush_is_due():
            self.flush()

    def _show(self, items: Sequence[Folded], *, muted: bool, details: Sequence[SourceDetail] = ()) -> None:
        """# Hot path: once per batch; the points go out before anything that may wait for the disk."""
        points = points_of(items, self._fold.take_times())
        updates: list[LiveUpdate] = []
        if points and self._tails.ensure(point.name for point in points):
            updates.append(MetricsUpdate(run_id=self._run_id))
        self._tails.append(points)
        if muted:
            return
        live = live_points(self._run_id, items)
        if live is not None:
            updates.append(live)
        if updates:
            self._publish(updates)
        self._act(items, details)

    def _act(self, items: Sequence[Folded], details: Sequence[SourceDetail]) -> None:
        """Judge the items and write what they changed: episodes, exits, notes, counters, details."""
        episodes = self._judge.observe(items)
        events = [item for item in items if isinstance(item, FoldedEvent)]
        late, self._seen_late = self._fold.num_late - self._seen_late, self._fold.num_late
        if not episodes and not events and not late and not details:
            return
        is_run_changed = bool(late or details)
        with self._database.write() as conn:
            for event in events:
                is_run_changed |= self._note(conn, event)
            for episode in episodes:
                alerts.upsert_episode(conn, self._run_key, episode)
            if late:
                runs.count_rejected(conn, self._run_key, late, _LATE)
            if num_refused := add_details(conn, self._run_key, details):
                runs.count_rejected(conn, self._run_key, num_refused, _TOO_MUCH_DETAIL)
        self._tell(episodes, is_run_changed)

    def _tell(self, episodes: Sequence[Episode], is_run_changed: bool) -> None:
        updates: list[LiveUpdate] = [AlertUpdate(run_id=self._run_id, episode=one) for one in episodes]
        if is_run_changed:
            updates.append(RunUpdate(run_id=self._run_id))
        if updates:
            self._publish(updates)

    def _note(self, conn: Connection, event: FoldedEvent) -> bool:
        """Write what an event says about the run; whether it said something."""
        source_id = self._source_ids[event.attempt, event.rank]
        attributes = event.attributes
        if event.kind == "exception":
            # The exit event follows at once, and says that it was an exception but not which.
            self._exceptions[source_id] = f"{attributes.get('type', '')}: {attributes.get('message', '')}"
            return False
        if event.kind == "exit":
            exception = self._exceptions.pop(source_id, None)
            # A trainer's clock may be ahead; retention counts from here by the server's.
            ended_s = min(event.time_s, self._clock.now_s())
            runs.set_exit(conn, self._run_key, source_id, attributes, ended_s, exception=exception)
        elif event.kind == "environment":
            runs.add_environment(conn, self._run_key, source_id, attributes["facts"])
        elif event.kind == "unavailable":
            metric, reason = str(attributes.get("metric", "")), str(attributes.get("reason", ""))
            runs.add_unavailable(conn, self._run_key, metric, reason)
        elif event.kind == "dump" and event.step is not None:
            add_dump(conn, self._run_key, source_id, event.step, event.time_s, attributes)
        elif event.kind == "metric":
            if not define_metric(conn, self._run_key, attributes):
                runs.count_rejected(conn, self._run_key, 1, _NO_DEFINITION)
        elif event.kind == "dropped":
            reports = self._dropped.get(source_id, 0) + max(0, int(attributes.get("reports", 0)))
            # A sum beyond what a column holds would keep this run from ever being stored again.
            self._dropped[source_id] = min(reports, wire.MAX_STEP)
            runs.heartbeat(conn, self._run_key, self._clock.now_s(), dropped=self._dropped)
        else:
            return False
        return True

    def _make_layout(self, layer_names: tuple[str, ...], numels: tuple[int, ...]) -> Layout:
        found = self._layouts.get(layer_names)
        if found is None or found.numels != numels:
            with self._database.write() as conn:
                found = ensure_layout(conn, self._run_key, layer_names, numels)
            self._layouts[layer_names] = found
        return found

    def flush_is_due(self) -> bool:
        """Enough has come together, or nothing more is coming for now."""
        enough_bytes = min(MAX_FLUSH_BYTES, max(FLUSH_BYTES, FLUSH_SERIES_BYTES * self._tails.num_series))
        if self._tails.num_bytes >= enough_bytes or self._log_bytes >= FLUSH_LOG_BYTES:
            return True
        now_s = self._clock.monotonic_s()
        if self._tails.num_steps >= FLUSH_STEPS and now_s >= self._flushed_s + FLUSH_EVERY_S:
            return True
        # Cheap questions first: this is asked after every batch of every rank.
        if not self._fold.is_closed() and self._idle_s() < FLUSH_IDLE_S:
            return False
        return bool(self._tails.num_steps) or self._fold.offsets() != self._flushed

    def is_done_with(self) -> bool:
        """Everything is stored and nothing has come for a while: the owner may be dropped."""
        return self._idle_s() >= UNLOAD_IDLE_S and not self._tails.num_steps and not self.flush_is_due()

    def _idle_s(self) -> float:
        return self._clock.monotonic_s() - self._touched_s

    def flush(self) -> None:
        """Move the tails into chunks, and with them the offsets and the memory of fold and rules, in one commit.

        Raises:
            StoreUnavailable, FlushConflict: nothing was written, nothing is lost.
        """
        offsets = self._fold.offsets()
        if not self._tails.num_steps and offsets == self._flushed:
            return
        memory = OwnerMemory(
            fold=self._fold.memory(), episodes=self._judge.firing(), dropped=dict(self._dropped)
        )
        states = states_to_store(self._judge.snapshot(), memory)
        plan = chunks.plan_flush(self._database, self._run_key, self._tails.snapshot())
        with self._database.write() as conn:
            chunks.commit_flush(
                conn, plan, folded=offsets, rule_states=states, last_steps=self._fold.last_steps()
            )
        # Readers take the tails first and the chunks second, so they meet a point twice rather than not at all.
        self._tails.clear()
        self._flushed, self._flushed_s, self._log_bytes = offsets, self._clock.monotonic_s(), 0

    def tails(self) -> Mapping[int, Tail]:
        """Points that are not in chunks yet, by series id. Any thread."""
        return self._tails.snapshot()

    def latest(self, names: Collection[str] | None = None) -> Mapping[str, tuple[int, float]]:
        """(step, value) of every merged scalar, as far as it was folded since the load. Any thread."""
        return self._tails.latest(names)

    @property
    def last_step(self) -> int | None:
        """Highest step of a merged scalar that was folded since the load. Any thread."""
        return self._tails.last_step
