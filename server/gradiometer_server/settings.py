"""What a server is told at its start: from the command line first, then from `GRADIOMETER_*` variables.

| setting | option | variable |
|---|---|---|
| database_url | --database | GRADIOMETER_DATABASE_URL |
| host, port | --host, --port | GRADIOMETER_HOST, GRADIOMETER_PORT |
| token | --token-file | GRADIOMETER_TOKEN |
| allowed_hosts | | GRADIOMETER_ALLOWED_HOSTS (names separated by commas) |
| path_prefix | --path-prefix | GRADIOMETER_PATH_PREFIX |
| retention | | GRADIOMETER_RETENTION_... (see `Retention`) |
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gradiometer_server.errors import ConfigurationError

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 7717
MIN_TOKEN_CHARS: Final = 16
DEFAULT_INTERVAL_S: Final = 3600.0
STATIC_DIR: Final = Path(__file__).with_name("static")

_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What old runs lose, and when; None: never.

    Attributes:
        detail_days: age at which a run loses its rings and histograms.
        thin_days: age at which it loses its raw points; summaries stay.
        delete_days: age at which it is deleted.
        max_bytes: size beyond which the oldest runs lose details, then raw points.
        delete_for_space: and are then deleted.
        interval_s: between two looks.
    """

    detail_days: float | None = None
    thin_days: float | None = None
    delete_days: float | None = None
    max_bytes: int | None = None
    delete_for_space: bool = False
    interval_s: float = DEFAULT_INTERVAL_S

    @property
    def applies_by_age(self) -> bool:
        """Whether any age is set."""
        return any(days is not None for days in (self.detail_days, self.thin_days, self.delete_days))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Checked settings of one server.

    Attributes:
        database_url: SQLAlchemy URL.
        host: address or name to listen on.
        port: 0 lets the system choose a free one.
        token: what every request must show; None only on a loopback address.
        allowed_hosts: host names, besides loopback and `host`, under which browsers and agents may reach the server.
        path_prefix: "" or "/name": the path under which a reverse proxy publishes the server.
        static_dir: folder of the built page.
        read_threads: how many REST requests may read the database at once; the rest wait.
        retention: what old runs lose.

    Raises:
        ConfigurationError: for a port, token or prefix that cannot be used, and for a bind that others can reach
            without a token.
    """

    database_url: str
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    token: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    path_prefix: str = ""
    static_dir: Path = STATIC_DIR
    read_threads: int = 8
    retention: Retention = Retention()

    def __post_init__(self) -> None:
        _check_port(self.port)
        _check_token(self.token, self.host)
        if not _PREFIX.fullmatch(self.path_prefix):
            raise ConfigurationError(
                f"the path prefix {self.path_prefix!r} is not usable.",
                remedy="Give a path such as /gradiometer: it begins with a slash and does not end with one.",
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def settings_from(
    environ: Mapping[str, str],
    *,
    database_url: str,
    host: str | None = None,
    port: int | None = None,
    token_file: str | None = None,
    path_prefix: str | None = None,
) -> Settings:
    """Settings from options (None: not given) over `environ` over defaults; raises `ConfigurationError`."""
    names = environ.get("GRADIOMETER_ALLOWED_HOSTS", "").split(",")
    return Settings(
        database_url=database_url,
        host=host or environ.get("GRADIOMETER_HOST") or DEFAULT_HOST,
        port=port if port is not None else _port_of(environ),
        token=_read_token(token_file) if token_file else environ.get("GRADIOMETER_TOKEN") or None,
        allowed_hosts=tuple(name.strip().lower() for name in names if name.strip()),
        path_prefix=path_prefix if path_prefix is not None else environ.get("GRADIOMETER_PATH_PREFIX", ""),
        retention=retention_from(environ),
    )


_RETENTION: Final = "GRADIOMETER_RETENTION_"
_DETAIL_DAYS: Final = "GRADIOMETER_RETENTION_DETAIL_DAYS"
_THIN_DAYS: Final = "GRADIOMETER_RETENTION_THIN_DAYS"
_DELETE_DAYS: Final = "GRADIOMETER_RETENTION_DELETE_DAYS"
_MAX_BYTES: Final = "GRADIOMETER_RETENTION_MAX_BYTES"
_DELETE_FOR_SPACE: Final = "GRADIOMETER_RETENTION_DELETE_FOR_SPACE"
_INTERVAL: Final = "GRADIOMETER_RETENTION_INTERVAL_S"
_KNOWN: Final = (_DETAIL_DAYS, _THIN_DAYS, _DELETE_DAYS, _MAX_BYTES, _DELETE_FOR_SPACE, _INTERVAL)
_UNITS: Final = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]iB|)")


def retention_from(environ: Mapping[str, str]) -> Retention:
    """Retention from the environment; raises `ConfigurationError`, also for a name of it that is not known."""
    found = {
        name: text.strip() for name, text in environ.items() if name.startswith(_RETENTION) and text.strip()
    }
    unknown = sorted(set(found) - set(_KNOWN))
    if unknown:
        raise ConfigurationError(
            f"there is no setting {unknown[0]}.", remedy=f"Use one of {', '.join(_KNOWN)}."
        )
    return Retention(
        detail_days=_positive(found, _DETAIL_DAYS),
        thin_days=_positive(found, _THIN_DAYS),
        delete_days=_positive(found, _DELETE_DAYS),
        max_bytes=_bytes_of(found.get(_MAX_BYTES)),
        delete_for_space=_switch(found.get(_DELETE_FOR_SPACE, "0")),
        interval_s=_positive(found, _INTERVAL) or DEFAULT_INTERVAL_S,
    )


def _positive(found: Mapping[str, str], name: str) -> float | None:
    text = found.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(
            f"{name} is {text!r}.", remedy="Give a number above 0, or leave it away: never."
        )
    return value


def _bytes_of(text: str | None) -> int | None:
    if text is None:
        return None
    match = _BYTES.fullmatch(text)
    num_bytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if num_bytes <= 0:
        raise ConfigurationError(
            f"{_MAX_BYTES} is {text!r}.", remedy="Give bytes, or a number with KiB, MiB, GiB or TiB: 200GiB."
        )
    return num_bytes


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigurationError(f"{_DELETE_FOR_SPACE} is {text!r}.", remedy="Give 0 or 1.")
    return text == "1"


def _port_of(environ: Mapping[str, str]) -> int:
    text = environ.get("GRADIOMETER_PORT") or str(DEFAULT_PORT)
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"GRADIOMETER_PORT is {text!r}, which is not a number.", remedy="Set it to 0..65535."
        ) from None


def _read_token(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"cannot read the token file {path!r}: {error}.",
            remedy="Name a readable text file that holds the token.",
        ) from error


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise ConfigurationError(
            f"the port {port} does not exist.", remedy="Give 0 (any free port) to 65535."
        )


def _check_token(token: str | None, host: str) -> None:
    if token is None:
        if not is_loopback(host):
            raise ConfigurationError(
                f"listening on {host} lets other machines in, and no token is set.",
                remedy=f"Set GRADIOMETER_TOKEN to at least {MIN_TOKEN_CHARS} characters, or listen on 127.0.0.1.",
            )
        return
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(
            f"the token is not usable: it needs at least {MIN_TOKEN_CHARS} printable ASCII characters without spaces.",
            remedy="Make one with: python -c 'import secrets; print(secrets.token_urlsafe(24))'",
        )
