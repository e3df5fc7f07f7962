"""The address of a server as text: shown without a password, and refused where it holds one.

The server reads a bearer token and no `user:password@`, which programs print, log and pass on command lines.
"""

from __future__ import annotations

import urllib.parse
from typing import Final

DEFAULT_URL: Final = "http://127.0.0.1:7717"


def shown(url: str) -> str:
    """`url`, valid or not, with everything that could be a user's name and password replaced by "***"."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    # A password may hold any character where the address is wrong, so everything up to the last "@" is hidden.
    _, at, host = rest.rpartition("@")
    return f"{scheme}{separator}***@{host}" if at else url


def refuse_credentials(url: str) -> None:
    """Raise `ValueError` for an address with a user's name or password in it; one that cannot be parsed passes."""
    try:
        has_credentials = "@" in urllib.parse.urlsplit(url).netloc
    except ValueError:
        return
    if has_credentials:
        raise ValueError(
            f"url {shown(url)!r} holds a user name or password, which the server does not read and which others "
            "can see: leave out everything up to the @, and give the server's token in GRADIOMETER_TOKEN."
        )
