"""What a trainer that ends by itself leaves for its uplink, which sees the real end and may not get to know its code.

Python tells nobody inside the process with which code it ends: no hook runs for `SystemExit`, and a `sys.exit` may have
been caught. So at the interpreter's end the trainer writes down what it believes, in its rank's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from gradiometer import spool

_FILE: Final = "last_words.json"


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """The interpreter came to its orderly end.

    Attributes:
        code: the exit code that is to be expected.
        guessed: whether the process may well end with another one.
    """

    code: int | None
    guessed: bool


def write(directory: Path, words: LastWords) -> None:
    """Leave them in a rank's folder; raises `OSError`."""
    spool.write_atomically(directory / _FILE, msgspec.json.encode(words))


def read(directory: Path) -> LastWords | None:
    """What was left in a rank's folder; None if nothing was, or nothing that can be read."""
    try:
        return msgspec.json.decode((directory / _FILE).read_bytes(), type=LastWords)
    except (OSError, msgspec.DecodeError):
        return None
