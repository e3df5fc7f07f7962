"""The server's error tree. Foreign errors are translated into these once, at the edge where they occur.

GradiometerError
├── ConfigurationError      wrong settings: port in use, unwritable path, missing token, newer database
├── NotFound                a run, metric, alert that does not exist
├── InvalidRequest          a caller's request that cannot be answered; names the field
├── NotAcceptable           an answer in a form that this server cannot give
├── Conflict                a request that does not fit the state that things are in
├── ProtocolError           an agent broke the wire protocol (see ingest/session.py)
└── StoreUnavailable        the database refuses writes for now (disk full, connection lost); retry later
"""

from __future__ import annotations


class GradiometerError(Exception):
    """Base of all errors that the server raises on purpose.

    Every one carries a stable `code`, what happened, and a `remedy` that tells the reader what to do.
    """

    code = "error"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        self.message, self.remedy = message, remedy
        super().__init__(f"{message} {remedy}".strip())


class ConfigurationError(GradiometerError):
    """The server cannot start, or a command cannot run, with these settings."""

    code = "configuration"


class NotFound(GradiometerError):
    """What was asked for does not exist."""

    code = "not_found"

    def __init__(self, what: str, name: str, *, remedy: str = "") -> None:
        self.what, self.name = what, name
        super().__init__(f"no {what} named {name!r}", remedy=remedy)


class InvalidRequest(GradiometerError):
    """A request that cannot be answered; `field` says which part of it is wrong."""

    code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None, remedy: str = "") -> None:
        self.field = field
        super().__init__(message, remedy=remedy)


class NotAcceptable(GradiometerError):
    """An answer was asked for in a form that this server cannot give."""

    code = "not_acceptable"


class Conflict(GradiometerError):
    """A request that is valid but cannot be carried out as things stand, e.g. with no agent connected."""

    def __init__(self, message: str, *, code: str, remedy: str = "") -> None:
        self.code = code
        super().__init__(message, remedy=remedy)


class ProtocolError(GradiometerError):
    """An agent's message or record breaks the protocol."""

    code = "protocol"

    def __init__(self, message: str, *, code: str, remedy: str = "", fatal: bool = False) -> None:
        self.code, self.fatal = code, fatal
        super().__init__(message, remedy=remedy)


class StoreUnavailable(GradiometerError):
    """The database refuses to write for now; nothing that was acknowledged is lost."""

    code = "store_unavailable"
