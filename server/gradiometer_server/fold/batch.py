"""What ingest hands to the fold after the commit."""

from __future__ import annotations

from dataclasses import dataclass

from gradiometer import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Consecutive records of one source; they are in the log already, so losing a batch costs a replay, no data.

    Attributes:
        first_seq, last_seq: what the batch covers; refused records in between are missing from `entries`.
        entries: (seq, record), in order.
        num_bytes: encoded size.
    """

    run_key: int
    source_id: int
    first_seq: int
    last_seq: int
    entries: tuple[tuple[int, wire.Record], ...]
    num_bytes: int
