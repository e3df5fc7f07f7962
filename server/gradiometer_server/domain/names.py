"""Names and identities: how a public id becomes a storage key, and which metric names the server itself makes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

GRAD_NORM: Final = "grad/norm"
GRAD_ABS_MAX: Final = "grad/abs_max"
GRAD_NUM_NONFINITE: Final = "grad/num_nonfinite"
GRAD_ZERO_FRACTION: Final = "grad/zero_fraction"
GRAD_COVERAGE: Final = "grad/coverage_fraction"
"""Share of the gradient's elements that the ranks told of a step; below 1 the totals of the whole are withheld."""
TIME: Final = "_time"
"""Unix seconds of each step: a series of its own, hidden from metric lists."""
LAYER_PREFIX: Final = "layer/"
"""Layer statistics are series named `layer/<statistic>` whose width is the number of layers."""


def run_key(run_id: str) -> int:
    """Storage key of a run: 63 bits of BLAKE2b of its public id.

    Derived, not allocated: several servers and shards agree on it without asking each other, and a repeated hello
    finds the same rows. A collision would need about 2**31 runs; the store still compares the public id.
    """
    return int.from_bytes(blake2b(run_id.encode(), digest_size=8).digest(), "big") >> 1
