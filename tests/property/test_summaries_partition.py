"""Chunks are a function of the set of points: any order and any portions end with the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradiometer_server.summaries import partition
from gradiometer_server.summaries.blocks import Block, decode_points, encode_points, problem_of
from gradiometer_server.summaries.partition import ROOT_SHIFT, Span

CAPACITY = 4

steps_near = st.integers(0, 60)
steps_far = st.integers(0, 2**53 - 1)
streams = st.lists(steps_near | steps_far, min_size=1, max_size=80)


def canonical(steps: np.ndarray) -> list[list[int]]:
    """The definition itself: the largest dyadic intervals with at most CAPACITY points, found from the top."""

    def cut(low: int, shift: int, inside: list[int]) -> list[list[int]]:
        if not inside:
            return []
        if len(inside) <= CAPACITY:
            return [inside]
        half = low + (1 << (shift - 1))
        left, right = [s for s in inside if s < half], [s for s in inside if s >= half]
        return cut(low, shift - 1, left) + cut(half, shift - 1, right)

    return cut(0, ROOT_SHIFT, sorted(set(steps.tolist())))


def flush(chunks: list[np.ndarray], new: np.ndarray, *, known: int | None) -> list[np.ndarray]:
    """One flush over plain lists of steps; `known`: hand over only the chunks from this one on, as the store does."""
    new = np.unique(new)
    start = 0
    if known is not None:
        before = [i for i, c in enumerate(chunks) if c[0] <= new[0]]
        start = max(0, before[-1] - known) if before else 0
        if len(before) <= known:
            start = 0
    spans = [Span(step0=int(c[0]), step1=int(c[-1]), n=len(c)) for c in chunks[start:]]
    result = list(chunks)
    added = []
    gone = set()
    for part in partition.place(spans, new):
        steps = new[part.begin : part.end]
        if part.span is not None:
            gone.add(start + part.span)
            steps = np.unique(np.concatenate([chunks[start + part.span], steps]))
        added += [steps[cut] for cut in partition.split(steps, CAPACITY, shift=part.shift)]
    kept = [c for i, c in enumerate(result) if i not in gone]
    return sorted(kept + added, key=lambda c: int(c[0]))


@given(streams, st.lists(st.integers(0, 80), max_size=10), st.sampled_from([None, 1]))
def test_any_portions_make_the_canonical_chunks(
    stream: list[int], cuts: list[int], known: int | None
) -> None:
    steps = np.array(stream, np.int64)
    chunks: list[np.ndarray] = []
    for portion in np.split(steps, sorted(min(cut, len(steps)) for cut in cuts)):
        if len(portion):
            chunks = flush(chunks, portion, known=known)
    assert [c.tolist() for c in chunks] == canonical(steps)


def test_a_dense_series_has_full_aligned_chunks() -> None:
    steps = np.arange(1, 20_000, dtype=np.int64)
    cuts = partition.split(steps, 4096, shift=ROOT_SHIFT)
    assert [(int(steps[c][0]), int(steps[c][-1])) for c in cuts] == [
        (1, 4095), (4096, 8191), (8192, 12287), (12288, 16383), (16384, 19999),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "capacity"), [(1, 4096), (16, 4096), (17, 2048), (148, 256), (1024, 64), (100_000, 64)]
)
def test_capacity(width: int, capacity: int) -> None:
    assert partition.chunk_capacity(width) == capacity


@given(streams)
def test_the_later_of_a_repeated_step_wins(stream: list[int]) -> None:
    steps = np.array(stream, np.int64)
    values = np.arange(len(steps), dtype=np.float64)[:, None]
    kept, kept_values = partition.last_wins(steps, values)
    expected = dict(zip(stream, range(len(stream)), strict=True))
    assert dict(zip(kept.tolist(), kept_values[:, 0].tolist(), strict=True)) == expected
    assert kept.tolist() == sorted(expected)


points = st.lists(
    st.tuples(steps_near | steps_far, st.floats(allow_subnormal=True) | st.floats(width=32)),
    min_size=1,
    max_size=150,
)


def block_of(chosen: list[tuple[int, float]]) -> tuple[Block, np.ndarray, np.ndarray]:
    steps, values = partition.last_wins(
        np.array([s for s, _ in chosen], np.int64), np.array([v for _, v in chosen])[:, None]
    )
    return encode_points(steps, values), steps, values


@given(points)
def test_a_block_decodes_and_agrees_with_its_summary(chosen: list[tuple[int, float]]) -> None:
    block, steps, values = block_of(chosen)
    back_steps, back_values = decode_points(block, 1)
    assert back_steps.tolist() == steps.tolist()
    assert back_values.view(np.uint64).tolist() == values.view(np.uint64).tolist()
    assert problem_of(block, 1) is None


@given(points, points)
def test_a_summary_of_other_points_is_noticed(
    one: list[tuple[int, float]], two: list[tuple[int, float]]
) -> None:
    block, steps, _ = block_of(one)
    other, other_steps, _ = block_of(two)
    if len(steps) == len(other_steps) and steps.tolist() == other_steps.tolist():
        return
    mixed = Block(**{**{name: getattr(block, name) for name in Block.__slots__}, "summary": other.summary})
    if other.summary != block.summary:
        assert problem_of(mixed, 1) is not None
