"""The run that an integration reports to: the one that the user opened, or one that it opens and ends itself."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Mapping
from typing import Any, Final

from gradiometer import limits
from gradiometer import run as agent
from gradiometer.guard import Guard
from gradiometer.plain import fields_of, plain
from gradiometer.run import Run

_opened_here: Final[weakref.WeakSet[Run]] = weakref.WeakSet()


class Session:
    """Finds or opens the run, and ends what it opened.

    Args:
        run: the user's run; None: the one that `gradiometer.init` opened before, else a new one.
        options: arguments of `gradiometer.init` for a new run.

    Raises:
        TypeError: an option is not an argument of `gradiometer.init`, or `run` is not a run.
        ValueError: both a run and options for another one.
    """

    def __init__(self, run: Run | None, options: Mapping[str, Any]) -> None:
        if run is not None and not isinstance(run, Run):
            raise TypeError(
                f"run is a {type(run).__name__}: pass what gradiometer.init() returned, or nothing."
            )
        if run is not None and options:
            raise ValueError(
                f"a run was given, so {', '.join(options)} would have no effect: pass them to gradiometer.init()."
            )
        inspect.signature(agent.init).bind_partial(**options)
        self._given = run
        self._options = dict(options)
        self._own: Run | None = None
        self.run: Run | None = None
        self._marked: tuple[str, int] | None = None

    @property
    def guard(self) -> Guard:
        """The guard of the run in use: its failures are the run's failures."""
        assert self.run is not None
        return self.run._guard

    def mark_once(self, name: str) -> None:
        """Mark something that several hooks tell about; the second call for a step does nothing."""
        if self.run is not None and self._marked != (name, self.run.step):
            self._marked = (name, self.run.step)
            self.run.mark(name)

    def unavailable(self, metric: str, reason: str) -> None:
        """Say on the run's page, and in the log, that `metric` cannot be collected."""
        assert self.run is not None
        self.run._unavailable(metric, reason, warn=True)

    @property
    def options(self) -> Mapping[str, Any]:
        """What the user said about a new run."""
        return self._options

    @property
    def is_of_the_user(self) -> bool:
        """Whether the user said anything about the run."""
        return self._given is not None or bool(self._options)

    def agrees_with(self, other: Session) -> bool:
        """Whether the user gave a run here, and `other` reports to that run too."""
        theirs = other.run if other.is_open else other._given or other._users_own()
        return self._given is not None and self._given is theirs

    @property
    def is_open(self) -> bool:
        """Whether `open` was called, and what it opened has not ended."""
        return self.run is not None and (self._own is not None or self.run not in _opened_here)

    def open(
        self,
        *,
        config: Mapping[str, Any],
        start_step: int = 0,
        saved_id: str | None = None,
        new_id: str | None = None,
        **defaults: Any,
    ) -> Run:
        """The run from now on.

        Args:
            config: what the framework knows about the training; the user's own config is added and wins.
            start_step: optimizer steps completed before.
            saved_id: id of the run that wrote the checkpoint; a new run continues it, unless the user named another.
            new_id: id for a run that continues nothing; None: make one.
            defaults: more arguments of `gradiometer.init`, for what the user did not say.

        Raises:
            ValueError: see `gradiometer.init`.
        """
        self.finish()
        self.run = self._given or self._users_own()
        if self.run is None:
            if os.environ.get("GRADIOMETER_PROJECT"):
                defaults.pop("project", None)
            if isinstance(name := defaults.get("name"), str):
                defaults["name"] = limits.fitting_label(name) or None
            # A framework's own settings (an `id2label` of 20,000 classes) are nothing that a user could correct.
            fitting = limits.fitting_config(plain(config))
            options = {**defaults, **self._options, "config": merged(fitting, self._options.get("config"))}
            options.setdefault("start_step", start_step)
            options.update(_which_run(options, saved_id, new_id))
            self.run = self._own = agent.init(**options)
            _opened_here.add(self._own)
        return self.run

    def _users_own(self) -> Run | None:
        current = agent.current()
        # The run of an earlier training that an integration opened is over.
        return None if current is None or current in _opened_here else current

    def fail(self, error: BaseException) -> None:
        """The training ended with `error`, which is on its way to the user. A run of the user's is left to them."""
        if self._own is not None:
            self._own.note_exception(error)
            self._own.finish(1)
            self._own = None

    def finish(self, exit_code: int = 0) -> None:
        """End the run if it was opened here."""
        if self._own is not None:
            self._own.finish(exit_code)
            self._own = None


def _which_run(options: Mapping[str, Any], saved_id: str | None, new_id: str | None) -> dict[str, Any]:
    """Arguments of `gradiometer.init` that say which run it is, as far as the user did not."""
    users_id, users_resume = (
        options.get(name) or os.environ.get(f"GRADIOMETER_{name.upper()}") for name in ("run_id", "resume")
    )
    if users_id:
        return {}
    if users_resume:
        return {"run_id": saved_id} if saved_id and users_resume in ("allow", "must") else {}
    return {"run_id": saved_id, "resume": "allow"} if saved_id else {"run_id": new_id}


def watch_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `Run.watch` that a user gave.

    Raises:
        TypeError: `Run.watch` has no such argument.
    """
    options = dict(given or {})
    inspect.signature(Run.watch).bind_partial(None, None, None, None, **options)
    return options


def merged(config: Mapping[str, Any], users: Any) -> dict[str, Any]:
    """`config` with the user's own entries, which win.

    Raises:
        ValueError: the user's config is neither a mapping nor an object with attributes.
    """
    if users is None:
        return dict(config)
    fields = fields_of(users)
    if fields is None:
        raise ValueError(
            f"config is a {type(users).__name__}: pass a dict, a dataclass or an argparse.Namespace."
        )
    return {**config, **fields}
