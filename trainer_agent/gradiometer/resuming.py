"""Which run to go on with: whether it exists already, and which one the same command had when it last ended badly.

`resume="must"` and `"never"` ask the server and the spool; what neither can tell is said and does not stop a training.
`resume="auto"` keeps the run's id in a small file of the spool while the run is open, and removes it after a good end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import json
import logging
import os
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Final

import msgspec

from gradiometer import launch, process, spool
from gradiometer.launch import Launch
from gradiometer.plain import encodable
from gradiometer.settings import Settings

_log: Final = logging.getLogger(__name__)

FOLDER: Final = ".resume"
"""In the spool. No run's folder can have this name: `spool.run_folder` encodes a leading dot."""
ASK_TIMEOUT_S: Final = 3.0
_MOST_ANSWER_BYTES: Final = 16 * 1024 * 1024


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file: the run that is open, and who opened it.

    Attributes:
        launch: `launch.mark()` of the processes that opened it; equal on all ranks of one launch.
        pid, process_start, hostname: rank 0's process.
    """

    run_id: str
    attempt: int
    launch: str
    pid: int
    process_start: str | None
    hostname: str


def check(settings: Settings) -> None:
    """Hold `must` and `never` against what exists. One rank asks: the others would find what it has just made.

    Raises:
        ValueError: the run is missing, is there, or belongs to another project.
    """
    run_id, asked = settings.run_id, settings.resume
    if (
        asked not in ("must", "never")
        or run_id is None
        or settings.mode == "disabled"
        or launch.own_rank() != 0
    ):
        return
    exists = _exists(settings, run_id)
    if exists is None:
        _log.warning(
            "gradiometer: resume=%r could not be checked: neither %s nor the spool says whether run %s exists. "
            "The training goes on; if the run exists, it is continued as a new attempt.",
            asked,
            settings.url if settings.mode == "online" else "a server (the mode is offline)",
            run_id,
        )
    elif exists and asked == "never":
        raise ValueError(
            f"resume='never', but run {run_id!r} exists already: choose another run_id, or pass resume='allow'."
        )
    elif not exists and asked == "must":
        raise ValueError(
            f"resume='must', but there is no run {run_id!r} at {settings.url} or in the spool at {settings.spool}: "
            "correct run_id, or pass resume='allow' to begin it."
        )


def _exists(settings: Settings, run_id: str) -> bool | None:
    """Whether the run is known; None if nobody can say so."""
    if any((settings.spool / spool.run_folder(run_id)).glob("*/run.json")):
        return True
    return _ask_server(settings, run_id) if settings.mode == "online" else None


def _ask_server(settings: Settings, run_id: str) -> bool | None:
    address = f"{settings.url}/api/v1/runs/{urllib.parse.quote(run_id, safe='')}"
    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
    request = urllib.request.Request(address, headers=headers)  # noqa: S310  `settings` lets http(s) through alone
    local = urllib.parse.urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")
    handlers = [urllib.request.ProxyHandler({})] if local else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=ASK_TIMEOUT_S) as answer:
            project = json.loads(answer.read(_MOST_ANSWER_BYTES))["project"]
    except urllib.error.HTTPError as error:
        with error:
            # Something else than our server may say 404 as well; ours names the code.
            return False if error.code == 404 and b'"not_found"' in error.read(65_536) else None
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return None
    if settings.resume == "must" and project != settings.project:
        raise ValueError(
            f"run {run_id!r} belongs to project {project!r}, not to {settings.project!r}: pass project={project!r}."
        )
    return True


def continued(settings: Settings) -> Settings:
    """For `auto` without an id: the settings with the id of the run that this command left unfinished, if it did."""
    if settings.resume != "auto" or settings.run_id is not None or settings.mode == "disabled":
        return settings
    note = Memory(settings).read()
    if note is None or (note.launch != launch.mark() and _still_runs(note)):
        return settings
    _log.info("gradiometer: resume='auto': run %s did not end well and is continued.", note.run_id)
    return dataclasses.replace(settings, run_id=note.run_id, previous_attempt=note.attempt)


def _still_runs(note: Note) -> bool:
    """Whether the run belongs to another process that lives; on another machine it is taken to be dead."""
    return note.hostname == socket.gethostname() and process.is_running(note.pid, note.process_start)


class Memory:
    """The file of one command: the same project, run name, working directory and script."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._is_used = settings.resume == "auto"

    def _path(self) -> Path:
        # Asked late, because a working directory may be gone, which must not stop a run that needs no memory.
        script = str(Path(sys.argv[0]).absolute()) if sys.argv and sys.argv[0] else ""
        one = self._settings
        command = [one.project, one.name or "", one.group or "", str(Path.cwd()), script]
        digest = hashlib.sha256("\0".join(map(encodable, command)).encode()).hexdigest()[:24]
        return one.spool / FOLDER / f"{digest}.json"

    def read(self) -> Note | None:
        """What is remembered; None if nothing is, or nothing that can be read."""
        try:
            return msgspec.json.decode(self._path().read_bytes(), type=Note)
        except (OSError, msgspec.DecodeError):
            return None

    def remember(self, identity: Launch) -> None:
        """The run is open now. Rank 0; raises `OSError`."""
        if not self._is_used or identity.rank != 0:
            return
        note = Note(
            run_id=identity.run_id,
            attempt=identity.attempt,
            launch=launch.mark(),
            pid=os.getpid(),
            process_start=process.start_mark(os.getpid()),
            hostname=socket.gethostname(),
        )
        path = self._path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        spool.write_atomically(path, msgspec.json.encode(note))

    def forget(self, identity: Launch) -> None:
        """The run ended well: the next one is another. Raises `OSError`."""
        if not self._is_used or identity.rank != 0:
            return
        note = self.read()
        # The same command may have been started again beside this one.
        if note is not None and (note.run_id, note.attempt) == (identity.run_id, identity.attempt):
            self._path().unlink(missing_ok=True)
