"""The server's token: checked before it is used, and never shown.

A token that no HTTP header can carry would otherwise be quoted in full by whatever library refuses it.
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "GRADIOMETER_TOKEN"
_MAX_CHARS: Final = 4096


def checked_token(token: object) -> str | None:
    """The token as it is sent; None if there is none.

    Args:
        token: as given to `init`; what surrounds it in a file or a shell (blanks, a line's end) is left out.

    Raises:
        ValueError: it cannot be a token; the message does not quote it.
    """
    if token is None:
        return None
    if not isinstance(token, str):
        raise ValueError(f"token is a {type(token).__name__}: pass a string, or set {VARIABLE}.")
    text = token.strip()
    if not text:
        return None
    problem = _problem(text)
    if problem is not None:
        raise ValueError(
            f"token (not shown) {problem}: pass the server's own token, which is printable ASCII without blanks "
            f"(argument `token` or {VARIABLE})."
        )
    return text


def _problem(text: str) -> str | None:
    if len(text) > _MAX_CHARS:
        return f"has {len(text)} characters"
    for place, char in enumerate(text, 1):
        if not "!" <= char <= "~":
            # The character alone gives nothing away: it is what does not belong there.
            return f"holds U+{ord(char):04X} as character {place} of {len(text)}"
    return None


def token_from_environment() -> str | None:
    """The token in `GRADIOMETER_TOKEN`; raises like `checked_token`."""
    return checked_token(os.environ.get(VARIABLE))
