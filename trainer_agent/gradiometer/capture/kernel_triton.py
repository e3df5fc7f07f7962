"""The statistics of many gradients in two launches, in Triton's language. Imports triton: import only via `kernel`.

`chunk_partials` reads every gradient once: a program works on one chunk of one gradient, whose address it takes from a
table. `fold_chunks` adds the chunks of each gradient up in float64. Nothing is added atomically, so that the same
gradients give the same bits. Elements are added in float32, BLOCK lanes at a time, and reduced per chunk; a chunk
whose squares leave the range of float32, or whose sum does, is read again in float64.
"""

# mypy: ignore-errors
# Triton compiles these functions itself: their parameters are addresses, and their types are Triton's.

import triton
import triton.language as tl

CHUNK_WIDTH = tl.constexpr(6)
ROW_WIDTH = tl.constexpr(7)
# Below this mean square (a root mean square of 1e-18) squares get near float32's smallest normal number.
SMALLEST_MEAN_SQUARE = tl.constexpr(1e-36)


@triton.jit
def _sums(base, num, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum and sum of squares of a chunk, added in DTYPE."""
    total = tl.zeros([BLOCK], DTYPE)
    squares = tl.zeros([BLOCK], DTYPE)
    for start in range(0, num, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(base + at, mask=at < num, other=0.0).to(DTYPE)
        total += values
        squares += values * values
    return tl.sum(total, 0), tl.sum(squares, 0)


@triton.jit
def _with(values, inside, total, squares, low, high, zeros, finite, nans):
    """The statistics with one more block; where not `inside`, `values` are 0 and do not count."""
    number = inside & (values == values)
    return (
        total + values,
        squares + values * values,
        tl.minimum(low, tl.where(number, values, float("inf"))),
        tl.maximum(high, tl.where(number, values, float("-inf"))),
        zeros + (inside & (values == 0.0)).to(tl.int32),
        finite + (inside & (tl.abs(values) < float("inf"))).to(tl.int32),
        nans + (inside & (values != values)).to(tl.int32),
    )


@triton.jit
def _partials(base, num, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """All statistics of a chunk, added in DTYPE; the extremes leave out NaN, which is counted apart."""
    total = tl.zeros([BLOCK], DTYPE)
    squares = tl.zeros([BLOCK], DTYPE)
    low = tl.full([BLOCK], float("inf"), DTYPE)
    high = tl.full([BLOCK], float("-inf"), DTYPE)
    zeros = tl.zeros([BLOCK], tl.int32)
    finite = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    lanes = tl.arange(0, BLOCK)
    whole = num // BLOCK * BLOCK
    everywhere = lanes >= 0
    # Without a mask, so that several elements are loaded at once.
    for start in range(0, whole, BLOCK):
        values = tl.load(base + start + lanes).to(DTYPE)
        total, squares, low, high, zeros, finite, nans = _with(
            values, everywhere, total, squares, low, high, zeros, finite, nans
        )
    if whole < num:
        inside = whole + lanes < num
        values = tl.load(base + whole + lanes, mask=inside, other=0.0).to(DTYPE)
        total, squares, low, high, zeros, finite, nans = _with(
            values, inside, total, squares, low, high, zeros, finite, nans
        )
    return (
        tl.sum(total, 0),
        tl.sum(squares, 0),
        tl.min(low, 0),
        tl.max(high, 0),
        tl.sum(zeros, 0),
        num - tl.sum(finite, 0),
        tl.sum(nans, 0),
    )


@triton.jit
def chunk_partials(
    addresses,
    lengths,
    owners,
    starts,
    chunks,
    ELEMENT: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row of float64 (6,) for each chunk: sum, sum of squares, min, max, zeros, non-finite.

    Args:
        addresses, lengths: of the gradients, int64.
        owners, starts: for each chunk, its gradient (int32) and its first element in it (int64).
        ELEMENT: type of the gradients; DTYPE: type to add them in.
    """
    chunk = tl.program_id(0)
    owner = tl.load(owners + chunk)
    start = tl.load(starts + chunk)
    num = tl.minimum(tl.load(lengths + owner) - start, CHUNK).to(tl.int32)
    address = tl.load(addresses + owner)
    base = address.to(tl.pointer_type(ELEMENT)) + start
    # A gradient that is a view of a bucket may begin anywhere; only what is aligned can be loaded in wide words.
    if address % 16 == 0:
        total, squares, low, high, zeros, nonfinite, nans = _partials(
            tl.multiple_of(base, 16), num, DTYPE, BLOCK
        )
    else:
        total, squares, low, high, zeros, nonfinite, nans = _partials(base, num, DTYPE, BLOCK)
    total = total.to(tl.float64)
    squares = squares.to(tl.float64)
    if DTYPE == tl.float32:  # noqa: SIM300  what looks like a constant is the variable
        overflowed = (squares == float("inf")) | (total != total) | (tl.abs(total) == float("inf"))
        underflowed = (squares < num.to(tl.float32) * SMALLEST_MEAN_SQUARE) & (zeros < num)
        if (nans == 0) & (overflowed | underflowed):
            total, squares = _sums(base, num, tl.float64, BLOCK)
    nan = float("nan")
    row = chunks + chunk.to(tl.int64) * CHUNK_WIDTH
    tl.store(row, total)
    tl.store(row + 1, squares)
    tl.store(row + 2, tl.where(nans > 0, nan, low.to(tl.float64)))
    tl.store(row + 3, tl.where(nans > 0, nan, high.to(tl.float64)))
    tl.store(row + 4, zeros.to(tl.float64))
    tl.store(row + 5, nonfinite.to(tl.float64))


@triton.jit
def fold_chunks(chunks, firsts, lengths, table, BLOCK: tl.constexpr):
    """Row of float64 (7,) for each gradient, as in `wire.STATISTICS`, from its chunks firsts[g] .. firsts[g + 1] - 1."""
    gradient = tl.program_id(0)
    first = tl.load(firsts + gradient)
    last = tl.load(firsts + gradient + 1)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    zeros = tl.zeros([BLOCK], tl.float64)
    nonfinite = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.int32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < last
        row = chunks + at.to(tl.int64) * CHUNK_WIDTH
        total += tl.load(row, mask=inside, other=0.0)
        squares += tl.load(row + 1, mask=inside, other=0.0)
        chunk_low = tl.load(row + 2, mask=inside, other=float("inf"))
        chunk_high = tl.load(row + 3, mask=inside, other=float("-inf"))
        nans += (chunk_low != chunk_low).to(tl.int32)
        low = tl.minimum(low, tl.where(chunk_low == chunk_low, chunk_low, float("inf")))
        high = tl.maximum(high, tl.where(chunk_high == chunk_high, chunk_high, float("-inf")))
        zeros += tl.load(row + 4, mask=inside, other=0.0)
        nonfinite += tl.load(row + 5, mask=inside, other=0.0)
    has_nan = tl.sum(nans, 0) > 0
    out = table + gradient.to(tl.int64) * ROW_WIDTH
    tl.store(out, tl.load(lengths + gradient).to(tl.float64))
    tl.store(out + 1, tl.sum(total, 0))
    tl.store(out + 2, tl.sum(squares, 0))
    tl.store(out + 3, tl.where(has_nan, float("nan"), tl.min(low, 0)))
    tl.store(out + 4, tl.where(has_nan, float("nan"), tl.max(high, 0)))
    tl.store(out + 5, tl.sum(zeros, 0))
    tl.store(out + 6, tl.sum(nonfinite, 0))
