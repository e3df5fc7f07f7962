"""Learns how the training process ends, and leaves everything else about its end as it was.

An exception that nobody caught, `sys.exit(code)`, a normal end, SIGTERM, a fork, a crash of the interpreter: each is
told to the run once. Which code an orderly end has is a guess, because `raise SystemExit(code)` runs no hook. Exit codes, tracebacks and signals reach whoever started the process unchanged.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Protocol

from gradiometer.plain import encodable, text_of

MAX_TRACEBACK_CHARS: Final = 16 * 1024


class Ending(Protocol):
    """What the run does when the process ends."""

    def note_exception(self, error: BaseException) -> None:
        """An exception ends the process."""
        ...

    def end(self, code: int | None, signal_name: str | None, *, guessed: bool = False) -> None:
        """The process ends now; `guessed`: perhaps with another code."""
        ...

    def abandon(self) -> None:
        """This is a forked child: the run belongs to the parent."""
        ...


class ProcessExits:
    """Watches the end of the process for one run at a time. Installed from `init`, removed by `finish`."""

    def __init__(self, ending: Ending, fault_log: Path) -> None:
        self._ending = ending
        self._fault_path = fault_log
        self._code: int | None = 0
        self._guessed = True
        self._removers: list[Callable[[], None]] = []

    def install(self) -> None:
        """Start watching."""
        atexit.register(self._at_exit)
        self._removers.append(lambda: atexit.unregister(self._at_exit))
        self._wrap_excepthook()
        self._wrap_exit()
        self._handle_sigterm()
        self._enable_faulthandler()

    def remove(self) -> None:
        """Stop watching; what others have put on top of our wrappers stays."""
        while self._removers:
            self._removers.pop()()

    def abandon(self) -> None:
        """In a forked child: forget the run without touching what the parent shares."""
        self._removers.clear()
        self._ending = _Nobody()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        self._ending.end(self._code, None, guessed=self._guessed)

    def _wrap_excepthook(self) -> None:
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
            self._code, self._guessed = (130 if issubclass(kind, KeyboardInterrupt) else 1), False
            self._ending.note_exception(error)
            previous(kind, error, where)

        sys.excepthook = excepthook

        def restore() -> None:
            if sys.excepthook is excepthook:
                sys.excepthook = previous

        self._removers.append(restore)

    def _wrap_exit(self) -> None:
        # No hook runs for SystemExit, and atexit cannot see the code. Somebody may catch it.
        previous = sys.exit

        def exit_noting(status: Any = None, /) -> Any:
            self._code, self._guessed = exit_code_of(status), True
            previous(status)

        sys.exit = exit_noting

        def restore() -> None:
            if sys.exit is exit_noting:
                sys.exit = previous

        self._removers.append(restore)

    def _handle_sigterm(self) -> None:
        on_main_thread = threading.current_thread() is threading.main_thread()
        if not on_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def handler(number: int, _frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            self._ending.end(None, signal.Signals(number).name)
            # With the default action back, the process ends as if nobody had looked.
            os.kill(os.getpid(), number)

        signal.signal(signal.SIGTERM, handler)

        def restore() -> None:
            # Only the main thread may, and only if the handler is still ours.
            with contextlib.suppress(ValueError):
                if signal.getsignal(signal.SIGTERM) is handler:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)

        self._removers.append(restore)

    def _enable_faulthandler(self) -> None:
        if faulthandler.is_enabled():
            return
        try:
            file = self._fault_path.open("wb")
        except OSError:
            return
        faulthandler.enable(file=file, all_threads=True)

        def restore() -> None:
            faulthandler.disable()
            file.close()
            with contextlib.suppress(OSError):
                if self._fault_path.stat().st_size == 0:
                    self._fault_path.unlink()

        self._removers.append(restore)


class _Nobody:
    """Stands for the run in a forked child."""

    def note_exception(self, error: BaseException) -> None:
        """Nothing."""

    def end(self, code: int | None, signal_name: str | None, *, guessed: bool = False) -> None:
        """Nothing."""

    def abandon(self) -> None:
        """Nothing."""


def exit_code_of(status: object) -> int:
    """The process's exit code for `sys.exit(status)` or `SystemExit(status).code`."""
    if status is None:
        return 0
    # A text is printed, and the code is 1.
    return int(status) & 0xFF if isinstance(status, int) else 1


def exception_attributes(error: BaseException) -> dict[str, str]:
    """Type, message and the end of the traceback, at most 16 KiB."""
    encoded = _traceback_of(error).encode("utf-8", "replace")[-MAX_TRACEBACK_CHARS:]
    return {
        "type": encodable(type(error).__qualname__),
        "message": text_of(error)[:4096],
        "traceback": encoded.decode("utf-8", "replace"),
    }


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception as second:  # noqa: BLE001  the report of an error must not fail on what a user put into it
        return f"(the traceback could not be made: {second!r})"


_after_fork: Final[list[Ending]] = []


def abandon_after_fork(ending: Ending) -> None:
    """From now on tell `ending`, and only it, about forks."""
    _after_fork[:] = [ending]


def _in_child() -> None:
    for ending in _after_fork:
        ending.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
