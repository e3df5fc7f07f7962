"""Carries reports from the training thread to the spool: a bounded queue and the agent's one thread.

The training thread only puts and never waits; when the queue holds too much the report is dropped and counted. The agent's
thread waits for the device, encodes, appends to the spool and wakes the uplink. An idle agent writes a report at
once; a busy one gathers 20 ms of them into one write.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from gradiometer import wire
from gradiometer.commands import Inbox
from gradiometer.drops import Drop, Drops
from gradiometer.flight import FlightDesk
from gradiometer.histograms import HistogramDesk
from gradiometer.recorder import Ring
from gradiometer.records import Records, RecordTooLarge, TooManyNames
from gradiometer.reports import EventReport, Report
from gradiometer.spool import SpoolError, SpoolFull, SpoolWriter

_log: Final = logging.getLogger(__name__)

MAX_BYTES: Final = 64 * 1024 * 1024
"""Memory of the reports in the queue, as `size_of` reckons: 200,000 single numbers, or half an hour of 100 logs per
second while the disk is stalled. What the gradients' statistics take has a limit of its own, in `capture/backlog.py`."""
_GATHER_S: Final = 0.02
_TELL_DROPS_S: Final = 1.0
_IDLE_S: Final = 5.0
_LEAVE_S: Final = 1.0
_BATCH_REPORTS: Final = 1024
_REPORT_BYTES, _NUMBER_BYTES, _READBACK_BYTES, _CHAR_BYTES = 300, 40, 1500, 4
"""Measured with `tracemalloc`; of a character, the most that Python takes."""

QUEUE_FULL: Final = "the agent's queue was full"
SPOOL_FULL: Final = "the spool was full"
SPOOL_BROKEN: Final = "the spool could not be written"
TOO_MANY_NAMES: Final = "the run has 10,000 different sets of metric names"
INTERNAL: Final = "internal error of the agent"


class _Flush:
    """Asks the agent's thread to say when everything before it is in the spool."""

    def __init__(self, *, last: bool) -> None:
        self.done = threading.Event()
        self.last = last


class Desks(Protocol):
    """Where commands of the server are carried out on the training thread; `flight` None: no flight recorder."""

    flight: FlightDesk | None
    histograms: HistogramDesk


class Feeder:
    """The queue and its thread.

    Args:
        writer: used by the agent's thread alone, and closed by it.
        drops: shared with the training thread.
        desks: told when the server asks for something, and when a step goes wrong; None: nobody is.
        appended: called on the agent's thread after records reached the spool, and every 5 idle seconds.
    """

    def __init__(
        self,
        writer: SpoolWriter,
        drops: Drops,
        appended: Callable[[], None],
        *,
        max_bytes: int = MAX_BYTES,
        desks: Desks | None = None,
    ) -> None:
        self._writer = writer
        self._drops = drops
        self._appended = appended
        self._flight = desks.flight if desks is not None else None
        self._histograms = desks.histograms if desks is not None else HistogramDesk(drops)
        self._max_bytes = max_bytes
        # Each is written by one side only, so that no lock is needed. Two training threads that put at the same
        # moment may lose an addition; that is mended when the queue is empty.
        self._put_bytes = self._taken_bytes = 0
        # SimpleQueue: put is one C call without a Python lock, and safe inside a signal handler.
        self._queue: queue.SimpleQueue[Report | _Flush] = queue.SimpleQueue()
        self._records = Records(Ring(drops, troubled=self._histograms.trouble))
        self._commands = Inbox(writer.directory)
        self._told_drops_s = 0.0
        self._exited = False
        self._hurry = threading.Event()
        self._closing: _Flush | None = None
        self._thread = threading.Thread(target=self._run, name="gradiometer-agent", daemon=True)
        self._thread.start()

    # Hot path: training thread. Must not wait, do I/O or allocate more than the report it was given.
    def put(self, report: Report) -> None:
        """Queue a report, or drop and count it."""
        num_bytes = size_of(report)
        if self._put_bytes - self._taken_bytes + num_bytes > self._max_bytes:
            self._drops.add(QUEUE_FULL, report.step)
            return
        self._put_bytes += num_bytes
        self._queue.put(report)

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything queued before is in the spool; False if that took longer than `deadline_s`."""
        return self._wait(_Flush(last=False), deadline_s)

    def close(self, deadline_s: float) -> bool:
        """Flush, close the spool's writer and end the thread; False if that took longer than `deadline_s`."""
        due_s = time.monotonic() + deadline_s
        if self._closing is None:
            self._closing = _Flush(last=True)
            written = self._wait(self._closing, deadline_s)
        else:
            written = self._closing.done.wait(max(0.0, deadline_s))
        if written:
            # A daemon thread that has run torch code and is still leaving when the interpreter ends is killed inside
            # C++ frames that must not unwind, which aborts the whole process. All it has left to do is to return, so a
            # deadline that was used up by writing is stretched for that.
            self._thread.join(max(_LEAVE_S, due_s - time.monotonic()))
        return written

    def put_essential(self, report: Report) -> None:
        """Queue a report that is written even if the queue is full: how the run ended."""
        self._put_bytes += size_of(report)
        self._queue.put(report)

    def _wait(self, marker: _Flush, deadline_s: float) -> bool:
        self._queue.put(marker)
        self._hurry.set()
        return marker.done.wait(max(0.0, deadline_s))

    def _run(self) -> None:
        flushed_s = 0.0
        while True:
            batch = self._next_batch(flushed_s)
            markers = [item for item in batch if isinstance(item, _Flush)]
            try:
                self._process([item for item in batch if not isinstance(item, _Flush)], final=bool(markers))
            except Exception as error:  # noqa: BLE001  top of the worker's loop: the agent must outlive a bad report
                self._drops.add(INTERNAL, None, detail=repr(error))
                _log.error("gradiometer: the agent's thread failed on a batch: %r", error, exc_info=error)
            flushed_s = time.monotonic()
            last = any(marker.last for marker in markers)
            if last:
                self._writer.close()
            for marker in markers:
                marker.done.set()
            if last:
                return

    def _next_batch(self, flushed_s: float) -> list[Report | _Flush]:
        try:
            batch = [self._queue.get(timeout=_IDLE_S)]
        except queue.Empty:
            return []
        wait_s = flushed_s + _GATHER_S - time.monotonic()
        # What fills a batch already need not be gathered.
        if wait_s > 0 and self._queue.qsize() < _BATCH_REPORTS:
            self._hurry.wait(wait_s)
        self._hurry.clear()
        while len(batch) < _BATCH_REPORTS:
            try:
                batch.append(self._queue.get_nowait())
            except queue.Empty:
                self._taken_bytes = self._put_bytes
                return batch
        self._taken_bytes += sum(size_of(item) for item in batch if not isinstance(item, _Flush))
        return batch

    def _process(self, reports: list[Report], *, final: bool) -> None:
        exits = [report for report in reports if _is_exit(report)]
        self._store([report for report in reports if not _is_exit(report)] if exits else reports)
        if not self._exited:
            self._ship(final=final or bool(exits))
            # Before the exit event, which closes the source.
            self._tell_drops(final=final or bool(exits))
            for report in exits:
                self._store([report], essential=True)
                self._exited = True
        self._appended()

    def _store(self, reports: list[Report], *, essential: bool = False) -> None:
        for report in reports:
            self._write(report)
        records = self._records.take()
        if not records:
            return
        try:
            self._writer.append_batch(records, essential=essential)
        except SpoolError as error:
            self._records.rollback()
            for report in reports:
                self._drop(error, report.step)
        else:
            self._records.commit()

    def _drop(self, error: SpoolError | RecordTooLarge, step: int | None) -> None:
        reason = SPOOL_FULL if isinstance(error, SpoolFull) else SPOOL_BROKEN
        self._drops.add(reason, step, detail=str(error))

    def _ship(self, *, final: bool) -> None:
        """Do what the server asked for, and send what the ring has to say, apart from the reports of this batch."""
        for command in self._commands.look(at_once=final):
            if command.kind == "ring":
                self._records.ring.ask(command)
            elif command.kind == "histogram":
                self._histograms.command(command)
            elif self._flight is not None:
                self._flight.asked = command
        try:
            self._records.add_ring(final=final)
            records = self._records.take()
            if records:
                self._writer.append_batch(records)
        except (SpoolError, RecordTooLarge) as error:
            self._records.rollback()
            self._drop(error, None)
        else:
            self._records.commit()

    def _write(self, report: Report) -> None:
        try:
            report.write(self._records)
        except TooManyNames as error:
            self._drops.add(TOO_MANY_NAMES, report.step, detail=str(error))
        except Exception as error:  # noqa: BLE001  one bad report must not take its neighbours along
            self._drops.add(INTERNAL, report.step, detail=repr(error))
            _log.debug("gradiometer: a report could not be written", exc_info=error)

    def _tell_drops(self, *, final: bool) -> None:
        now_s = time.monotonic()
        if not final and now_s - self._told_drops_s < _TELL_DROPS_S:
            return
        self._told_drops_s = now_s
        drops = self._drops.take()
        if not drops:
            return
        try:
            for drop in drops:
                self._records.add_event(_dropped_event(drop))
            self._writer.append_batch(self._records.take(), essential=True)
        except SpoolError:
            # No space yet: the count is told when there is.
            self._drops.give_back(drops)


# Hot path: training thread, for every report.
def size_of(report: Report) -> int:
    """About how many bytes a report takes in memory, apart from the statistics of gradients."""
    scalars = getattr(report, "scalars", None)
    if scalars is not None:
        num_numbers, num_readbacks = len(scalars.numbers), len(scalars.pending)
        return _REPORT_BYTES + _NUMBER_BYTES * num_numbers + _READBACK_BYTES * num_readbacks
    if isinstance(report, EventReport):
        texts = (text for text in report.attributes.values() if isinstance(text, str))
        return _REPORT_BYTES + _CHAR_BYTES * sum(map(len, texts))
    return _REPORT_BYTES


def _is_exit(report: Report) -> bool:
    return isinstance(report, EventReport) and report.kind == "exit"


def _dropped_event(drop: Drop) -> wire.Event:
    return wire.Event(
        kind="dropped",
        time=time.time(),
        step=drop.last_step,
        attributes={
            "reports": drop.count,
            "reason": drop.reason,
            "first_step": drop.first_step,
            "last_step": drop.last_step,
        },
    )
