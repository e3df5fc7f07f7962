"""The public face of the agent: `init` opens a run, `Run` takes what the training says about itself.

Wrong arguments of `init` raise `ValueError` with a remedy. After that nothing here raises into the training, waits
for the disk, the network or the device, or changes a result; what is discarded is counted in `Run.dropped`.
"""

from __future__ import annotations

import logging
import os
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gradiometer import environment, exits, launch, reports, resuming, settings, spool, values, wire
from gradiometer.definitions import DefinesMetrics
from gradiometer.delivery import Delivery
from gradiometer.drops import Drops
from gradiometer.feeder import Feeder
from gradiometer.flight import RecordsBatches, desk_of
from gradiometer.guard import Guard
from gradiometer.handle import Handle
from gradiometer.histograms import AsksForHistograms
from gradiometer.last_words import LastWords
from gradiometer.plain import shown, text_of
from gradiometer.reports import EventReport, Report, ScalarReport
from gradiometer.watching import Watches

if TYPE_CHECKING:
    import torch

_log: Final = logging.getLogger(__name__)

DEADLINE_S: Final = 10.0
LONGEST_DEADLINE_S: Final = 7 * 86_400.0
_SIGNAL_DEADLINE_S: Final = 2.0
_current: Run | None = None


def init(
    project: str | None = None,
    name: str | None = None,
    *,
    config: Mapping[str, Any] | object | None = None,
    tags: Iterable[str] | None = (),
    notes: str | None = "",
    group: str | None = None,
    mode: str | None = None,
    run_id: str | None = None,
    url: str | None = None,
    token: str | None = None,
    spool: str | os.PathLike[str] | None = None,
    resume: str | None = None,
    start_step: int = 0,
    flight_recorder: str | os.PathLike[str] | bool | None = None,
) -> Run:
    """Open a run; a run that is still open in this process is finished first.

    Args:
        project: folder of runs; else `GRADIOMETER_PROJECT`, else "default".
        name: what people call the run; else its id.
        config: hyperparameters: a mapping, a dataclass or an `argparse.Namespace`.
        tags, notes, group: for people, to find the run again.
        mode: "online", "offline" (write the spool only, to be sent later), "disabled" (do nothing); else
            `GRADIOMETER_MODE`, else "online".
        run_id: continue this run as a new attempt; else `GRADIOMETER_RUN_ID`, else a new id.
        url, token: the server; else `GRADIOMETER_URL` and `GRADIOMETER_TOKEN`, else http://127.0.0.1:7717.
        spool: folder for what was not delivered yet; else `GRADIOMETER_SPOOL`.
        resume: `run_id` may exist ("allow"), must ("must"), must not ("never"); "auto": go on with the run that this
            command left unfinished; else `GRADIOMETER_RESUME`. See `docs/configuration.md`.
        start_step: optimizer steps that the loaded checkpoint has completed; the next one is `start_step + 1`.
        flight_recorder: folder for steps that go wrong, True: `./gradiometer-dumps`; else `GRADIOMETER_FLIGHT_RECORDER`.

    Raises:
        ValueError: an argument or a variable is wrong; nothing was opened.
    """
    global _current
    resolved = settings.resolve(
        project=project,
        name=name,
        config=config,
        tags=tags,
        notes=notes,
        group=group,
        mode=mode,
        run_id=run_id,
        url=url,
        token=token,
        spool_path=spool,
        resume=resume,
        start_step=start_step,
        flight_recorder=flight_recorder,
    )
    resuming.check(resolved)
    if _current is not None:
        _current.finish()
    _current = Run._open(resuming.continued(resolved))
    return _current


def current() -> Run | None:
    """The run that is open in this process."""
    return _current


class Run(Handle, RecordsBatches, AsksForHistograms, DefinesMetrics):
    """One run as seen from one rank. Made by `init`.

    Without `watch` each `log` without a step is the step after the largest so far (from `start_step`). With `watch` the
    optimizer is the clock: the first completed (or skipped) `optimizer.step()` makes step `start_step + 1`, and what is
    logged without a step belongs to the step whose forward or backward pass has begun, else to the last completed one.

    Attributes:
        id: the public id; empty if the run is disabled.
    """

    def __init__(self, resolved: settings.Settings, identity: launch.Launch | None) -> None:
        self.id = identity.run_id if identity is not None else ""
        self._settings = resolved
        self._identity = identity
        self._next_step = self._logged_step = resolved.start_step
        self._unavailable_told: set[tuple[str, str]] = set()
        self._drops = Drops()
        self._flat_logs = reports.FlatLogs()
        self._guard = Guard(self._part_failed)
        self._watches = Watches(
            start_step=resolved.start_step,
            emit=self._put,
            unavailable=self._unavailable,
            mistaken=lambda metric, reason: self._unavailable(metric, reason, warn=True),
            guard=self._guard,
            drops=self._drops,
        )
        self._flight = self._watches.flight = desk_of(resolved, identity, self._put)
        self._feeder: Feeder | None = None
        self._delivery: Delivery | None = None
        self._exits: exits.ProcessExits | None = None
        self._memory = resuming.Memory(resolved)
        self._exception_told = False

    @classmethod
    def _open(cls, resolved: settings.Settings) -> Run:
        if resolved.mode == "disabled":
            return cls(resolved, None)
        identity = launch.identify(resolved)
        try:
            writer = spool.open_source(
                resolved.spool,
                environment.run_info(resolved, identity),
                environment.source_info(resolved, identity),
            )
        except spool.SpoolError as error:
            _log.warning("gradiometer: the run is not recorded, the training goes on: %s", error)
            return cls(resolved, None)
        run = cls(resolved, identity)
        run._start(writer)
        return run

    def _start(self, writer: spool.SpoolWriter) -> None:
        assert self._identity is not None
        self._delivery = Delivery(writer, self._settings, rank=self._identity.rank, guard=self._guard)
        self._feeder = Feeder(writer, self._drops, self._delivery.appended, desks=self._watches)
        self._delivery.start()
        self._guard.tolerate("resume", self._memory.remember, self._identity)
        self._exits = exits.ProcessExits(self, writer.directory / "fault.log")
        self._exits.install()
        exits.abandon_after_fork(self)
        self._delivery.announce(self.id, self.url)

    @property
    def url(self) -> str:
        """The run's page; empty if the run is disabled."""
        return f"{self._settings.url}/runs/{urllib.parse.quote(self.id, safe='')}" if self.id else ""

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was recorded."""
        return self._settings.config

    @property
    def step(self) -> int:
        """The last completed optimizer step; without `watch`, the last step logged."""
        watched = self._watches.step
        return self._logged_step if watched is None else watched

    @property
    def dropped(self) -> dict[str, int]:
        """Number of reports that were discarded, by reason."""
        return self._drops.totals

    @property
    def failures(self) -> dict[str, int]:
        """Number of errors inside the agent, by part; each was logged once, and none reached the training."""
        return dict(self._guard.failures)

    @property
    def directory(self) -> Path | None:
        """This rank's folder in the spool; None if the run is disabled."""
        return self._delivery.directory if self._delivery is not None else None

    # Hot path: training thread. Must not wait for a device or a lock, or do I/O.
    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers of one step; never raises.

        Args:
            metrics: names and values: numbers, numpy scalars, one-element tensors on any device (copied there, not
                waited for), bools, None (absent); nested mappings are joined with "/".
            step: see the class; 0 <= step < 2**53.
        """
        if self._feeder is not None:
            self._guard.entered_tolerantly("log", self._log, metrics, step)

    def log_microbatch(self, metrics: Mapping[str, Any]) -> None:
        """Record numbers of one micro-batch under accumulation; never raises. Takes what `log` takes.

        When the optimizer step ends, each name gets the mean over the step's micro-batches (NaN if one of them is), and
        beside it `<name>_finite_mean` and `<name>_num_nonfinite`. Without `watch` this is `log`. Calling `log` several
        times for one step keeps the last value.
        """
        if self._feeder is not None:
            self._guard.entered_tolerantly("log", self._log, metrics, None, True)

    def watch(
        self,
        model: torch.nn.Module,
        optimizer: Any = None,
        scaler: Any = None,
        *,
        name: str | None = None,
        forward: bool | None = None,
        sharded: Mapping[str, Any] | None = None,
        checks: bool = True,
        statistics: str = "auto",
        every: int | None = None,
        histogram_every: int | None = None,
    ) -> None:
        """Capture every step of `optimizer` from now on; never raises.

        Call it after the model is wrapped (DDP, FSDP). Several watches are allowed; the first is the clock.

        Args:
            model: the module whose parameters the optimizer updates.
            optimizer: a torch optimizer, or Accelerate's or Lightning's wrapper of one; a list or dict of them: together
                they make a step; None: those that `_apply_optimizer_in_backward` hung on the parameters.
            scaler: the GradScaler, if there is one; without it, steps that it skips cannot be seen.
            name: told apart from other watches by this; its layers get it as a prefix. The first needs none. Changed, and
                this told, where the server would not take it or another watch has it.
            forward: also find the first module whose output held NaN or Inf. None: where it is known to be cheap.
            sharded: plain tensors that hold other values on each rank (expert parallelism): pattern of parameter names
                -> the process group, or one-dimensional device mesh, over which they differ: `{"experts.*": group}`.
            checks: look for mistakes in the loop that can be proved, such as a missing `zero_grad`.
            statistics: "norm": norms alone; "full": means, extremes and zeros too; "auto": those too, where they cost
                one pass over the gradients in every step, elsewhere in one of 50.
            every: "auto" or "full" in one of so many steps, norms in between; histogram_every: a histogram in one.
        """
        if self._feeder is not None:
            how = (forward, sharded, checks, statistics, every, histogram_every)
            self._guard.tolerate("watch", self._watches.add, model, optimizer, scaler, name, *how)

    def unwatch(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave model and optimizer as they were before `watch`; a later `watch` goes on counting. Never raises."""
        self._guard.tolerate("watch", self._watches.remove, optimizer)

    def alert(self, title: str, text: str = "", severity: str = "warning") -> None:
        """Raise an alert of your own; severity: info, warning, error or critical. Never raises."""
        if self._feeder is not None:
            self._guard.tolerate("alert", self._alert, title, text, severity)

    def mark(self, name: str) -> None:
        """Say that something planned happens now (evaluation, checkpoint, warm-up end), so that rules expect it."""
        if self._feeder is not None:
            attributes = {"name": text_of(name)[: wire.MAX_NAME_CHARS]}
            self._guard.tolerate("mark", self._event, "marker", attributes)

    def finish(self, exit_code: int = 0, *, deadline_s: float = DEADLINE_S) -> None:
        """Close the run: write what is queued, and give the uplink until the deadline to deliver it. Never raises.

        What could not be delivered stays in the spool and is sent later. The second call does nothing.
        """
        code = exits.exit_code_of(values.integer_or_itself(exit_code))
        reason = "finish" if code == 0 else "failed"
        # A mistake here must not leave the run open.
        valid = isinstance(deadline_s, (int, float)) and deadline_s == deadline_s
        due_s = time.monotonic() + min(max(0.0, deadline_s if valid else DEADLINE_S), LONGEST_DEADLINE_S)
        self._guard.tolerate("finish", self._close, code, None, reason, due_s, False)

    def note_exception(self, error: BaseException) -> None:
        """Record an exception that ends the run; the first one counts."""
        if self._feeder is None or self._exception_told:
            return
        self._exception_told = True
        self._guard.tolerate(
            "exception", lambda: self._event("exception", exits.exception_attributes(error), essential=True)
        )

    def end(self, code: int | None, signal_name: str | None, *, guessed: bool = False) -> None:
        """The process ends; `guessed`: perhaps with another code."""
        due_s = time.monotonic() + (DEADLINE_S if signal_name is None else _SIGNAL_DEADLINE_S)
        reason = "exit" if signal_name is None else "signal"
        self._guard.tolerate("finish", self._close, code, signal_name, reason, due_s, guessed)

    def abandon(self) -> None:
        """This is a forked child (a DataLoader worker): the run belongs to the parent."""
        self._feeder = None
        self._delivery = None
        # Another thread of the parent may have held its lock at the moment of the fork.
        self._drops = Drops()
        self._watches.abandon()
        if self._exits is not None:
            self._exits.abandon()

    def _log(self, metrics: Mapping[str, Any], step: int | None, of_microbatch: bool = False) -> None:
        at = self._step_for(step)
        if at is None:
            self._drops.add("a step is not valid", None, detail=shown(step)[:80])
            return
        if not hasattr(metrics, "items"):
            self._drops.add(
                "what was logged is not a mapping of names to numbers", at, detail=shown(metrics)[:80]
            )
            return
        flat = self._flat_logs.scalars(metrics)
        if flat is not None and not self._watches.is_watching:
            self._put(ScalarReport(step=at, time=time.time(), scalars=flat))
            return
        found = flat.found() if flat is not None else values.numbers_in(metrics, self._drops, at)
        self._watches.logged(found)
        if found and not (of_microbatch and self._watches.keep_for_step(found)):
            self._put(ScalarReport(step=at, time=time.time(), scalars=flat or reports.collected(found)))

    def _step_for(self, step: Any) -> int | None:
        if step is None:
            watched = self._watches.step_of_log()
            if watched is not None:
                return watched
            step = self._next_step
        elif hasattr(step, "__index__") and not isinstance(step, bool):
            step = step.__index__()
        if not reports.is_valid_step(step):
            return None
        valid: int = step
        # An earlier step named in between does not turn the counter back.
        self._logged_step, self._next_step = valid, max(self._next_step, valid + 1)
        return valid

    def _alert(self, title: object, text: object, severity: object) -> None:
        attributes = reports.alert_attributes(title, text, severity)
        if attributes["severity"] != severity:
            mistake = "an alert's severity is unknown, taken as warning"
            self._drops.add(mistake, self.step, detail=shown(severity)[:40])
        self._event("alert", attributes)

    def _event(self, kind: wire.EventKind, attributes: dict[str, Any], *, essential: bool = False) -> None:
        feeder = self._feeder
        if feeder is not None:
            report = EventReport(kind=kind, time=time.time(), step=self.step, attributes=attributes)
            put: Callable[[Report], None] = feeder.put_essential if essential else feeder.put
            put(report)

    def _put(self, report: Report) -> None:
        feeder = self._feeder
        if feeder is not None:
            feeder.put(report)

    def _unavailable(self, metric: str, reason: str, *, warn: bool = False) -> None:
        warn = warn or metric in ("grad/layers", "grad/norm")
        if (metric, reason) in self._unavailable_told:
            return
        self._unavailable_told.add((metric, reason))
        if warn:
            _log.warning("gradiometer: %s is unavailable: %s.", metric, reason)
        self._event("unavailable", {"metric": metric, "reason": reason})

    def _part_failed(self, part: str, error: Exception) -> None:
        self._unavailable(part, f"the agent failed: {error!r}"[:1000])

    def _close(self, code: int | None, killer: str | None, reason: str, due_s: float, guessed: bool) -> None:
        global _current
        feeder, delivery = self._feeder, self._delivery
        if feeder is None or delivery is None:
            return
        self._watches.close(ended_well=code == 0)
        # Only the uplink sees the code of an interpreter that ends by itself.
        if reason != "exit" or not delivery.leave(LastWords(code=code, guessed=guessed)):
            told = {"code": code, "signal": killer, "inferred": guessed, "reason": reason}
            self._event("exit", told, essential=True)
        self._feeder = None
        if code == 0 and self._identity is not None:
            self._guard.tolerate("resume", self._memory.forget, self._identity)
        if _current is self:
            _current = None
        if self._exits is not None:
            self._exits.remove()
        if not feeder.close(due_s - time.monotonic()):
            _log.warning("gradiometer: the last reports were not written in time.")
            return
        delivery.finish(due_s)
