"""What FSDP1 (`FullyShardedDataParallel`) knows about the original parameters inside its flat ones.

A unit joins its parameters in one flat tensor, cuts that into equal parts and gives each rank one. With
`use_orig_params=True` the original parameters are views of the rank's part, or empty; without it only the flat
parameter is left, and its metadata says which stretch of the local part belongs to which original.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

FLAT_NAME: Final = "_flat_param"
"""Last part of a flat parameter's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPiece:
    """One original parameter.

    Attributes:
        shape, numel: of the original parameter, unsharded.
        shard, num_shards: as in `wire.Layer`.
        name: relative to the FSDP1 unit; None where the parameter object has its own name in the model.
        owner: the module that had the parameter; None like `name`.
        span: where its elements are in the gradient of the flat parameter; None: all of the gradient.
    """

    shape: tuple[int, ...]
    numel: int
    shard: tuple[int, ...]
    num_shards: int
    name: str | None = None
    owner: torch.nn.Module | None = None
    span: slice | None = None


def pieces(model: torch.nn.Module) -> dict[int, tuple[FlatPiece, ...]]:
    """By `id(parameter)`, the pieces in it, for every FSDP1 unit in the model.

    A flat parameter whose metadata this version of torch hides has a single piece, of its own shape.
    """
    found: dict[int, tuple[FlatPiece, ...]] = {}
    for module in model.modules():
        handle = getattr(module, "_handle", None)
        if getattr(handle, "flat_param", None) is not None:
            found.update(_of_unit(handle))
    return found


def _of_unit(handle: Any) -> Iterator[tuple[int, tuple[FlatPiece, ...]]]:
    flat = handle.flat_param
    originals = getattr(flat, "_params", None)
    shard, num_shards = _place(handle)
    if originals is None:
        yield id(flat), _in_flat(flat, shard, num_shards) or (_whole(flat, shard, num_shards),)
        return
    for parameter, shape in zip(originals, flat._shapes, strict=False):
        sizes = tuple(int(size) for size in shape)
        piece = FlatPiece(shape=sizes, numel=math.prod(sizes), shard=shard, num_shards=num_shards)
        yield id(parameter), (piece,)


def _place(handle: Any) -> tuple[tuple[int, ...], int]:
    """Shard key and number of shards; the group of a hybrid strategy is the one that shards."""
    if not handle.uses_sharded_strategy:
        return (), 1
    group = handle.process_group
    return (int(group.rank()),), int(group.size())


def _in_flat(flat: Any, shard: tuple[int, ...], num_shards: int) -> tuple[FlatPiece, ...]:
    """The originals in a flat parameter, in its order; empty if their places are not known."""
    columns = [
        getattr(flat, name, None) for name in ("_fqns", "_shapes", "_param_infos", "_shard_param_infos")
    ]
    if any(column is None or len(column) != len(columns[0] or ()) for column in columns):
        return ()
    found = []
    for name, shape, info, local in zip(*columns, strict=True):
        sizes = tuple(int(size) for size in shape)
        start = int(local.offset_in_shard) if local.in_shard else 0
        size = int(local.numel_in_shard) if local.in_shard else 0
        piece = FlatPiece(
            shape=sizes,
            numel=math.prod(sizes),
            shard=shard,
            num_shards=num_shards,
            name=str(name),
            owner=info.module,
            span=slice(start, start + size),
        )
        found.append(piece)
    return tuple(found)


def _whole(flat: Any, shard: tuple[int, ...], num_shards: int) -> FlatPiece:
    full = getattr(flat, "_unpadded_unsharded_size", None)
    numel = int(full.numel()) if full is not None else int(flat.numel()) * num_shards
    return FlatPiece(shape=(numel,), numel=numel, shard=shard, num_shards=num_shards)
