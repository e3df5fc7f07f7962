"""Counts what agents got wrong since this process started, by code, whether or not a run was known by then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

REPEATED: Final = "repeated_record"
"""Records that were durable already: usual after a lost ack, not a mistake."""


class Tally:
    """Event loop only; reading a copy is safe from any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, code: str, count: int = 1) -> None:
        """`count` more of `code`, the code of a `wire.Problem`, of a `wire.Rejection`, or `REPEATED`."""
        if count > 0:
            self._counts[code] += count

    def counts(self) -> Mapping[str, int]:
        """By code."""
        return dict(self._counts)
