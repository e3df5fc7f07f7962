"""What the user asked for: arguments of `init` over environment variables over defaults, checked once.

This is the one place where the agent raises at the user; every message ends with what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from gradiometer import arguments, credentials, spool, wire
from gradiometer.address import DEFAULT_URL as DEFAULT_URL
from gradiometer.plain import shown

DEFAULT_PROJECT: Final = "default"
DUMPS_FOLDER: Final = "gradiometer-dumps"
MODES: Final = ("online", "offline", "disabled")
RESUMES: Final = ("allow", "must", "never", "auto")

Mode = Literal["online", "offline", "disabled"]
Resume = Literal["allow", "must", "never", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A checked request for a run.

    Attributes:
        run_id: None: make one.
        attempt: launch time in Unix milliseconds given from outside; None: find it out.
        start_step: optimizer steps completed before this attempt.
        token: the server's token, kept out of `repr`.
        resume: whether the run is expected to exist already; see `init`.
        previous_attempt: an earlier attempt of the run that is known here; this one comes after it. 0: none.
        flight_recorder: folder for dumps; None: off. `max_dumps`: most of them in one process.
    """

    project: str
    name: str | None
    config: dict[str, Any]
    tags: tuple[str, ...]
    notes: str
    group: str | None
    mode: Mode
    run_id: str | None
    attempt: int | None
    url: str
    token: str | None
    spool: Path
    start_step: int
    resume: Resume | None = None
    previous_attempt: int = 0
    flight_recorder: Path | None = None
    max_dumps: int = 2

    def __repr__(self) -> str:
        return f"Settings(project={self.project!r}, run_id={self.run_id!r}, mode={self.mode!r}, url={self.url!r})"


def resolve(
    *,
    project: str | None,
    name: str | None,
    config: Mapping[str, Any] | object | None,
    tags: Iterable[str] | None,
    notes: str | None,
    group: str | None,
    mode: str | None,
    run_id: str | None,
    url: str | None,
    token: str | None,
    spool_path: str | os.PathLike[str] | None,
    resume: str | None,
    start_step: int,
    flight_recorder: str | os.PathLike[str] | bool | None = None,
) -> Settings:
    """Check the arguments of `init` and fill in the rest.

    Raises:
        ValueError: an argument or a variable is wrong; the message names it and the remedy.
    """
    _check_limits()
    given_id = _given(run_id, "RUN_ID")
    return Settings(
        project=arguments.project(_given(project, "PROJECT", DEFAULT_PROJECT)),
        name=arguments.label("name", name),
        config=arguments.config(config),
        tags=arguments.tags(tags),
        notes=arguments.notes(notes),
        group=arguments.label("group", group),
        mode=_mode(_given(mode, "MODE", "online")),
        run_id=None if given_id is None else arguments.run_id(given_id),
        attempt=_attempt(_env("ATTEMPT")),
        url=arguments.url(_given(url, "URL", DEFAULT_URL)),
        token=credentials.checked_token(token) or credentials.token_from_environment(),
        spool=_spool(spool_path),
        resume=_resume(_given(resume, "RESUME"), given_id),
        start_step=arguments.step("start_step", start_step),
        flight_recorder=_flight_recorder(flight_recorder),
        max_dumps=_max_dumps(_env("FLIGHT_DUMPS")),
    )


def _check_limits() -> None:
    """What only the spool and the uplink read, checked where somebody can still see the answer."""
    try:
        spool.max_bytes_from_environment()
        spool.linger_from_environment()
    except spool.SpoolError as error:
        raise ValueError(str(error)) from error


def _env(name: str) -> str | None:
    return os.environ.get(f"GRADIOMETER_{name}") or None


def _given(argument: object, variable: str, default: str | None = None) -> object:
    """The argument; for None or an empty text the variable, then the default."""
    # By type, because some objects (arrays) have no truth value.
    if argument is None or (isinstance(argument, str) and not argument):
        return _env(variable) or default
    return argument


def _mode(mode: object) -> Mode:
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(
            f"mode {shown(mode)[:80]} is unknown: use one of {', '.join(MODES)} (argument `mode` or GRADIOMETER_MODE)."
        )
    return cast(Mode, mode)


def _spool(path: object) -> Path:
    given = _given(path, "SPOOL")
    return spool.default_root() if given is None else arguments.folder("spool", given, "GRADIOMETER_SPOOL")


def _resume(resume: object, run_id: object) -> Resume | None:
    if resume is None:
        return None
    if not isinstance(resume, str) or resume not in RESUMES:
        raise ValueError(
            f"resume={shown(resume)[:80]} is unknown: use one of {', '.join(RESUMES)} (argument `resume` or "
            "GRADIOMETER_RESUME)."
        )
    if resume in ("allow", "must") and run_id is None:
        raise ValueError(
            f"resume={resume!r} needs to know the run: pass run_id=... or set GRADIOMETER_RUN_ID, or let "
            "resume='auto' find it."
        )
    return cast(Resume, resume)


def _flight_recorder(given: object) -> Path | None:
    found = arguments.flag_or_folder(
        "flight_recorder", _given(given, "FLIGHT_RECORDER", "off"), "GRADIOMETER_FLIGHT_RECORDER"
    )
    if isinstance(found, bool):
        return Path.cwd() / DUMPS_FOLDER if found else None
    return found.absolute()


def _max_dumps(text: str | None) -> int:
    if text is None:
        return 2
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 100:
        return int(text)
    raise ValueError(
        f"GRADIOMETER_FLIGHT_DUMPS is {text!r}: set it to the most dumps of one process, from 1 to 100."
    )


def _attempt(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        attempt = int(text)
    except ValueError:
        attempt = 0
    if not 0 < attempt <= wire.MAX_STEP:
        raise ValueError(
            f"GRADIOMETER_ATTEMPT is {text!r}: set it to the launch time in Unix milliseconds, equal on all ranks."
        )
    return attempt


DISABLED: Final = Settings(
    project=DEFAULT_PROJECT,
    name=None,
    config={},
    tags=(),
    notes="",
    group=None,
    mode="disabled",
    run_id=None,
    attempt=None,
    url=DEFAULT_URL,
    token=None,
    spool=Path(),
    start_step=0,
)
"""Of a run that does nothing, whatever the environment says."""
