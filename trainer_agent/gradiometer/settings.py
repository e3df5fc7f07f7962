"""What the user asked for: arguments of `init` over environment variables over defaults, checked once.

This is the one place where the agent raises at the user; every message ends with what to do.
"""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from gradiometer import address, spool, values, wire

DEFAULT_URL: Final = "http://127.0.0.1:7717"
DEFAULT_PROJECT: Final = "default"
DUMPS_FOLDER: Final = "gradiometer-dumps"
MODES: Final = ("online", "offline", "disabled")

Mode = Literal["online", "offline", "disabled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A checked request for a run.

    Attributes:
        run_id: None: make one.
        attempt: launch time in Unix milliseconds given from outside; None: find it out.
        start_step: optimizer steps completed before this attempt.
        token: the server's token, kept out of `repr`.
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
    flight_recorder: Path | None = None
    max_dumps: int = 2

    def __repr__(self) -> str:
        return f"Settings(project={self.project!r}, run_id={self.run_id!r}, mode={self.mode!r}, url={self.url!r})"


def resolve(
    *,
    project: str | None,
    name: str | None,
    config: Mapping[str, Any] | object | None,
    tags: Sequence[str],
    notes: str,
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
    given_id = run_id or _env("RUN_ID")
    _check_resume(resume, given_id)
    _check_limits()
    return Settings(
        project=_identifier("project", project or _env("PROJECT") or DEFAULT_PROJECT),
        name=None if name is None else _text("name", name),
        config=_config(config),
        tags=_tags(tags),
        notes=_text("notes", notes),
        group=None if group is None else _text("group", group),
        mode=_mode(mode or _env("MODE") or "online"),
        run_id=None if given_id is None else _identifier("run_id", given_id),
        attempt=_attempt(_env("ATTEMPT")),
        url=_url(url or _env("URL") or DEFAULT_URL),
        token=token or _env("TOKEN"),
        spool=Path(spool_path).expanduser() if spool_path is not None else spool.default_root(),
        start_step=_start_step(start_step),
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


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is a {type(value).__name__}: pass a string.")
    if values.encodable(value) != value:
        raise ValueError(f"{what} {value[:40]!r} holds characters that UTF-8 cannot carry: leave them out.")
    return value


def _identifier(what: str, value: object) -> str:
    text = _text(what, value)
    problem = wire.name_problem(text)
    if len(text) > wire.MAX_ID_CHARS:
        problem = f"it has {len(text)} characters; at most {wire.MAX_ID_CHARS} are allowed"
    if problem is not None:
        raise ValueError(f"{what} {text[:40]!r} cannot be used: {problem}. Choose a short printable {what}.")
    return text


def _mode(mode: object) -> Mode:
    if mode not in MODES:
        raise ValueError(
            f"mode {mode!r} is unknown: use one of {', '.join(MODES)} (argument `mode` or GRADIOMETER_MODE)."
        )
    return mode


def _url(url: object) -> str:
    if isinstance(url, str) and values.encodable(url) != url:
        raise ValueError(
            f"url {address.shown(url)!a} holds characters that UTF-8 cannot carry: leave them out."
        )
    text = _text("url", url).strip().rstrip("/")
    address.refuse_credentials(text)
    try:
        parts = urllib.parse.urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # urlsplit leaves out line breaks in silence; the address of a server has no query.
        valid = valid and text.isprintable() and not set(" ?#").intersection(text)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(
            f"url {address.shown(text)!r} is not the address of a server: give something like {DEFAULT_URL} "
            "(argument `url` or GRADIOMETER_URL)."
        )
    return text


def _tags(tags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"tags {tags!r} is not a list of strings: pass tags=['a', 'b'].")
    return tuple(_text("a tag", tag) for tag in tags)


def _config(config: Mapping[str, Any] | object | None) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        try:
            config = vars(config)
        except TypeError:
            raise ValueError(
                f"config is a {type(config).__name__}: pass a dict, a dataclass or an argparse.Namespace."
            ) from None
    return cast(dict[str, Any], values.plain(config))


def _check_resume(resume: object, run_id: str | None) -> None:
    if resume not in (None, "allow"):
        raise ValueError(
            f"resume={resume!r} is unknown: pass resume='allow' with a run_id to continue a run as a new attempt."
        )
    if resume == "allow" and run_id is None:
        raise ValueError("resume='allow' needs to know the run: pass run_id=... or set GRADIOMETER_RUN_ID.")


def _start_step(step: object) -> int:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= wire.MAX_STEP:
        raise ValueError(
            f"start_step {step!r} is not a step: pass the number of optimizer steps that the checkpoint has completed."
        )
    return step


def _flight_recorder(given: object) -> Path | None:
    if given is None:
        given = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}.get(
            (_env("FLIGHT_RECORDER") or "off").lower(), _env("FLIGHT_RECORDER")
        )
    if isinstance(given, bool):
        return Path.cwd() / DUMPS_FOLDER if given else None
    if isinstance(given, (str, os.PathLike)) and os.fspath(given):
        return Path(os.fspath(given)).expanduser().absolute()
    raise ValueError(
        f"flight_recorder {given!r} is not a folder: pass a path, True or False, or set GRADIOMETER_FLIGHT_RECORDER."
    )


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
