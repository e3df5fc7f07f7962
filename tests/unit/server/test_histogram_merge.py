"""Histograms of several ranks: shards add up, replicas count once, and what the bins are."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradiometer import wire
from gradiometer_server.domain.histograms import EDGES, RankHistograms, counts_of, merged
from gradiometer_server.ingest.checks import known_schema, record_fault

BINS = wire.HISTOGRAM_BINS


def schema(*layers: wire.Layer, schema_id: int = 2) -> wire.LayerSchema:
    return wire.LayerSchema(schema_id=schema_id, layers=layers)


def shard(name: str, index: int, of: int) -> wire.Layer:
    return wire.Layer(name, (6 * of,), 6 * of, (index,) if of > 1 else (), of)


def sent(rank: int, layers: tuple[wire.Layer, ...], fill: int, schema_id: int = 2) -> RankHistograms:
    counts = np.zeros((len(layers), BINS), dtype=np.int64)
    counts[:, 100] = fill
    counts[:, 255] = 1
    return RankHistograms(rank=rank, schema=schema(*layers, schema_id=schema_id), counts_LB=counts)


@given(order=st.permutations(range(5)))
def test_shards_add_up_and_copies_count_once_in_any_order(order: list[int]) -> None:
    # HSDP: ranks 0 and 2 hold the first shard of "a", 1 and 3 the second; "b" is whole on all four. Rank 1 watches
    # another model too.
    parts = [sent(rank, (shard("a", rank % 2, 2), shard("b", 0, 1)), 10**rank) for rank in range(4)]
    parts.append(sent(1, (shard("other.c", 0, 1),), 7, schema_id=5))
    a, b, c = merged([parts[index] for index in order])
    assert [one.name for one in (a, b, c)] == ["a", "b", "other.c"]
    assert (a.numel, int(a.counts_B[100]), int(a.counts_B[255])) == (12, 11, 2)
    assert (b.numel, int(b.counts_B[100]), int(b.counts_B[255])) == (6, 1, 1)
    assert int(c.counts_B[100]) == 7
    assert int(parts[0].counts_LB.sum()) == 4, "what was given is not changed"


def test_the_edges_are_those_of_the_exponent_field() -> None:
    assert len(EDGES) == BINS
    assert (EDGES[0], EDGES[1], EDGES[127], EDGES[254]) == (0.0, 2.0**-126, 1.0, 2.0**127)
    rng = np.random.default_rng(0)
    for value in np.exp2(rng.uniform(-126, 128, 200)).astype(np.float32).tolist():
        if math.isfinite(value):
            found = int(np.searchsorted(EDGES, value, side="right")) - 1
            assert found == (int(np.float32(value).view(np.uint32)) >> 23) & 255


def detail(**changes: object) -> wire.Detail:
    good: dict[str, object] = {
        "kind": "histogram", "reason": "look", "schema_id": 2, "steps": (4, 9), "times": (1.0, 2.0),
        "values": np.arange(2 * 3 * BINS, dtype="<u4").tobytes(),
    }  # fmt: skip
    return wire.Detail(**{**good, **changes})  # type: ignore[arg-type]


LAYERS = (shard("a", 0, 2), shard("b", 0, 1), shard("c", 0, 1))
KNOWN = {
    1: known_schema(wire.ScalarSchema(schema_id=1, columns=(wire.Column("x"),))),
    2: known_schema(schema(*LAYERS)),
    # The size does not depend on the statistics that the schema declares.
    3: known_schema(wire.LayerSchema(schema_id=3, layers=LAYERS, statistics=wire.NORM_STATISTICS)),
}


def test_a_histogram_is_known_by_its_layers() -> None:
    for schema_id in (2, 3):
        assert record_fault(detail(schema_id=schema_id), KNOWN) is None
    counts = counts_of(detail())
    assert (counts.shape, counts[1, 0, 0]) == ((2, 3, BINS), 3 * BINS)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"schema_id": 9}, "unknown_schema"),
        ({"schema_id": 1}, "unknown_schema"),
        ({"values": bytes(8 * 2 * 3 * BINS)}, "frame_length"),
        ({"values": bytes(4 * 2 * 3 * 7)}, "frame_length"),
        ({"values": b""}, "frame_length"),
        ({"times": (1.0,)}, "frame_length"),
        ({"times": (1.0, math.nan)}, "invalid_time"),
        ({"steps": (4, -1)}, "step_out_of_range"),
        ({"steps": (), "times": (), "values": b""}, "empty_frame"),
        ({"trigger_step": 2**60}, "step_out_of_range"),
        ({"reason": "x" * 501}, "invalid_detail"),
    ],
)
def test_what_is_no_histogram_is_refused(changes: dict[str, object], code: str) -> None:
    fault = record_fault(detail(**changes), KNOWN)
    assert fault is not None
    assert fault.code == code
    assert fault.message.startswith("histogram of schema")
