"""Merging ranks is exact: partial statistics of shards give the statistics of the whole gradient."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from gradiometer import wire
from gradiometer_server.domain.absent import ABSENT, is_absent
from gradiometer_server.domain.folded import LAYER_STATISTICS
from gradiometer_server.fold import derive
from gradiometer_server.fold.ranks import ExpectedShards, LayerMerger, merge_scalar, merged_layers


def partial(values_N: NDArray[np.float64]) -> list[float]:
    """The seven partial statistics of some elements, as an agent computes them."""
    if values_N.size == 0:
        return [0.0] * 7
    with np.errstate(all="ignore"):
        return [
            float(values_N.size),
            float(values_N.sum()),
            float((values_N * values_N).sum()),
            float(values_N.min()),
            float(values_N.max()),
            float((values_N == 0).sum()),
            float((~np.isfinite(values_N)).sum()),
        ]


def schema(*layers: wire.Layer, schema_id: int = 1) -> wire.LayerSchema:
    return wire.LayerSchema(schema_id=schema_id, layers=layers)


def layer(name: str, numel: int = 4, shard: tuple[int, ...] = (), num_shards: int = 1) -> wire.Layer:
    return wire.Layer(name=name, shape=(numel,), numel=numel, shard=shard, num_shards=num_shards)


def rows(*partials: list[float]) -> NDArray[np.float64]:
    return np.array(partials, dtype=np.float64)


def merge(
    schemas: dict[int, wire.LayerSchema], partials: dict[int, NDArray[np.float64]]
) -> NDArray[np.float64]:
    by_writer = {(rank, one.schema_id): one for rank, one in schemas.items()}
    names, _ = merged_layers(by_writer)
    merger = LayerMerger(names, by_writer)
    return merger.merge({(rank, schemas[rank].schema_id): one for rank, one in partials.items()}).partials_MP


def test_shards_of_a_gradient_merge_to_the_whole_whatever_their_order() -> None:
    rng = np.random.default_rng(3)
    whole = rng.normal(size=101)
    whole[17] = 0.0
    pieces = np.split(whole, [40, 40, 77])
    schemas = {rank: schema(layer("w", 101, (rank,), 4)) for rank in range(4)}
    partials = {rank: rows(partial(piece)) for rank, piece in enumerate(pieces)}
    results = []
    for order in itertools.permutations(range(4)):
        results.append(merge(schemas, {rank: partials[rank] for rank in order}).tobytes())
    assert len(set(results)) == 1, "bit for bit the same in any order"
    stats = {name: one[0] for name, one in derive.derive_layers(merge(schemas, partials)).items()}
    assert stats["norm"] == pytest.approx(np.linalg.norm(whole), rel=1e-12)
    assert stats["rms"] == pytest.approx(math.sqrt((whole**2).mean()), rel=1e-12)
    assert stats["mean"] == pytest.approx(whole.mean(), rel=1e-12)
    assert stats["std"] == pytest.approx(whole.std(), rel=1e-12)
    assert stats["abs_max"] == np.abs(whole).max()
    assert stats["zero_fraction"] == 1 / 101
    assert stats["num_nonfinite"] == 0
    assert tuple(stats) == LAYER_STATISTICS


@pytest.mark.parametrize(
    ("keys", "counted"),
    [
        ([((), 1), ((), 1), ((), 1), ((), 1)], [0]),
        ([((0,), 2), ((1,), 2), ((0,), 2), ((1,), 2)], [0, 1]),
        ([((0, 0), 4), ((0, 1), 4), ((1, 0), 4), ((1, 1), 4)], [0, 1, 2, 3]),
    ],
    ids=["data parallel", "hybrid sharded", "two-dimensional"],
)
def test_each_layer_and_shard_counts_once(
    keys: list[tuple[tuple[int, ...], int]], counted: list[int]
) -> None:
    schemas = {rank: schema(layer("w", 8, shard, n)) for rank, (shard, n) in enumerate(keys)}
    pieces = [np.arange(2.0) + 10 * rank for rank in range(4)]
    merged = merge(schemas, {rank: rows(partial(piece)) for rank, piece in enumerate(pieces)})
    expected = np.concatenate([pieces[rank] for rank in counted])
    assert merged[0].tolist() == partial(expected)
    expected_shards = ExpectedShards()
    assert [expected_shards.add(one.layers) for one in schemas.values()][-1] == keys[0][1]


def test_pipeline_stages_unite_in_the_order_of_the_lowest_rank() -> None:
    schemas = {
        (1, 1): schema(layer("b1"), layer("tied"), layer("b2")),
        (0, 1): schema(layer("a1", 7), layer("tied")),
    }
    assert merged_layers(schemas) == (("a1", "tied", "b1", "b2"), (7, 4, 4, 4))
    merged = merge(
        {0: schemas[0, 1], 1: schemas[1, 1]},
        {0: rows(partial(np.ones(7)), partial(np.ones(4))), 1: rows(*[partial(np.full(4, 3.0))] * 3)},
    )
    assert merged[:, derive.COUNT].tolist() == [7, 4, 4, 4]
    assert merged[:, derive.MAX].tolist() == [1, 1, 3, 3], (
        "the tied layer is a replica: the lowest rank counts"
    )


def test_a_layer_without_a_gradient_is_absent_and_never_zero() -> None:
    empty = [0.0, math.nan, -1.0, 5.0, -5.0, 2.0, 9.0]
    merged = merge({0: schema(layer("w"), layer("v"))}, {0: rows(empty, partial(np.array([3.0, 4.0])))})
    stats = derive.derive_layers(merged)
    for name in LAYER_STATISTICS:
        assert is_absent(stats[name]).tolist() == [True, False], name
    assert derive.derive_global(merged) == {
        "grad/norm": 5.0,
        "grad/abs_max": 4.0,
        "grad/num_nonfinite": 0.0,
        "grad/zero_fraction": 0.0,
    }
    assert derive.derive_global(merge({0: schema(layer("w"))}, {0: rows(empty)})) == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_on_one_rank_shows_in_the_merged_layer(bad: float) -> None:
    schemas = {rank: schema(layer("w", 4, (rank,), 2)) for rank in range(2)}
    by_writer = {(rank, 1): one for rank, one in schemas.items()}
    merged = LayerMerger(("w",), by_writer).merge(
        {(0, 1): rows(partial(np.ones(2))), (1, 1): rows(partial(np.array([1.0, bad])))}
    )
    stats = derive.derive_layers(merged.partials_MP)
    assert stats["num_nonfinite"][0] == 1
    assert not math.isfinite(stats["norm"][0])
    assert not math.isfinite(stats["abs_max"][0])
    assert {rank: one.tolist() for rank, one in merged.num_nonfinite_by_rank.items()} == {1: [1]}


def test_std_of_equal_values_is_zero_although_rounding_says_less() -> None:
    values = np.full(1000, 0.1)
    one = np.array([partial(values)])
    one[0, derive.SUM_SQUARES] = np.nextafter(one[0, derive.SUM_SQUARES], 0) - 1e-12
    assert derive.derive_layers(one)["std"][0] == 0.0


def test_std_is_infinite_and_not_nan_where_the_squares_of_finite_elements_are() -> None:
    derived = derive.derive_layers(
        np.array([partial(np.array([1e200, -1e200])), partial(np.array([1.0, math.inf]))])
    )
    assert derived["std"][0] == derived["norm"][0] == math.inf
    assert derived["num_nonfinite"].tolist() == [0.0, 1.0]
    assert math.isnan(derived["std"][1])


@pytest.mark.parametrize(
    ("factor", "differs"), [(1.0, False), (1 + 1e-7, False), (1.01, True), (math.nan, True)]
)
def test_replicas_that_disagree_are_found(factor: float, differs: bool) -> None:
    schemas = {(rank, 1): schema(layer("u"), layer("w")) for rank in range(2)}
    good = rows(partial(np.ones(4)), partial(np.ones(4)))
    other = good.copy()
    other[1, derive.SUM_SQUARES] *= factor
    found = LayerMerger(("u", "w"), schemas).mismatch({(0, 1): good, (1, 1): other})
    assert (found is not None) == differs
    if found is not None:
        assert (found.layer, found.ranks) == ("w", (0, 1))


@pytest.mark.parametrize(
    ("merge_name", "values", "expected"),
    [
        ("mean", {0: 1.0, 1: 2.0, 2: 6.0}, 3.0),
        ("sum", {0: 1.0, 1: 2.0}, 3.0),
        ("min", {0: 1.0, 1: -2.0}, -2.0),
        ("max", {0: 1.0, 1: -2.0}, 1.0),
        ("max", {0: math.inf, 1: -2.0}, math.inf),
        ("mean", {3: 0.1}, 0.1),
        ("sum", {0: 1e308, 1: 1e308}, math.inf),
    ],
)
def test_scalars_merge_as_declared(merge_name: str, values: dict[int, float], expected: float) -> None:
    assert merge_scalar(values, merge_name) == expected


@pytest.mark.parametrize("merge_name", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("ranks", [{0: math.nan, 1: 1.0}, {1: 1.0, 0: math.nan}, {0: 1.0, 1: math.nan}])
def test_a_nan_on_any_rank_is_never_hidden(merge_name: str, ranks: dict[int, float]) -> None:
    assert math.isnan(merge_scalar(ranks, merge_name))


def test_merging_does_not_depend_on_the_order_of_arrival() -> None:
    values = {0: 0.1, 1: 1e16, 2: -1e16, 3: 0.3}
    results = {merge_scalar(dict(order), "sum") for order in itertools.permutations(values.items())}
    assert len(results) == 1


def test_layers_are_stored_as_float32_unless_that_would_make_an_infinity() -> None:
    values = np.array([1.5, math.nan, math.inf, ABSENT])
    stored = derive.to_storage(values)
    assert stored.dtype == np.float32
    assert is_absent(stored).tolist() == [False, False, False, True]
    assert math.isinf(stored[2])
    large = derive.to_storage(np.array([1e300, ABSENT]))
    assert large.dtype == np.float64
    assert large[0] == 1e300
    assert is_absent(large).tolist() == [False, True]
