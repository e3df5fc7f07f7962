"""zstandard's contexts are not thread-safe; ours are one pair a thread. Shared ones crash within seconds here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gradiometer_server.summaries import codec


def round_trips(seed: int) -> int:
    values = np.random.default_rng(seed).standard_normal((4096, 1))
    right = 0
    for _ in range(60):
        back = codec.decode_values(codec.encode_values(values), 4096, 1)
        right += bool((back.view(np.uint64) == values.view(np.uint64)).all())
    return right


def test_eight_threads_pack_and_unpack_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trips, range(8))) == [60] * 8
