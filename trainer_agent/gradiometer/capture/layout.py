"""Which part of which parameter this rank holds, and what is a replica: the layers of a source.

Works without a collective. The shard key holds this rank's mesh coordinates on sharded dimensions only, so that two
ranks with equal keys hold equal copies, also where a parameter lives on a sub-mesh (FSDP2 with tensor parallelism).
FSDP2 and HSDP parameters are DTensors and say all this themselves; FSDP1 keeps it in its flat parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from gradiometer import wire

_TRANSPARENT: Final = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_REPLICATING: Final = ("DistributedDataParallel", "DataParallel")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The layers of one watch, in depth order, and the parameters behind them.

    Attributes:
        layers: as declared on the wire.
        parameters: the parameter of each layer.
        num_in_optimizer: how many parameters the optimizer had when this was built: another number needs a new layout.
    """

    layers: tuple[wire.Layer, ...]
    parameters: tuple[torch.Tensor, ...]
    num_in_optimizer: int


class LayoutError(ValueError):
    """The parameters of an optimizer cannot be laid out; the message says why."""


def build(model: torch.nn.Module, optimizer: Any, prefix: str) -> Layout:
    """Layers of the parameters that `optimizer` updates, in the order of `model.named_parameters()`.

    Called at the first step, not at `watch`: `fully_shard` replaces the parameter objects.

    Raises:
        LayoutError: no parameter of the model is in the optimizer, or there are more layers than the wire allows.
    """
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = _named(model, updated)
    if len(named) > wire.MAX_COLUMNS:
        raise LayoutError(
            f"the optimizer has {len(named)} parameters; at most {wire.MAX_COLUMNS} can be followed"
        )
    flat_pieces = dict(_flat_pieces(model))
    layers = tuple(_layer(prefix + name, parameter, flat_pieces) for name, parameter in named)
    return Layout(
        layers=layers, parameters=tuple(parameter for _, parameter in named), num_in_optimizer=len(updated)
    )


def num_in_optimizer(optimizer: Any) -> int:
    """How many parameters the optimizer updates now."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _named(model: torch.nn.Module, updated: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    wanted = {id(parameter) for parameter in updated}
    named = [(name, value) for name, value in model.named_parameters() if id(value) in wanted]
    if not named:
        raise LayoutError(
            "none of the model's parameters is in the optimizer: pass the model that the optimizer was built from"
        )
    found = {id(parameter) for _, parameter in named}
    strangers = [parameter for parameter in updated if id(parameter) not in found]
    clean = [(plain_name(model, name), parameter) for name, parameter in named]
    if len({name for name, _ in clean}) < len(clean):
        clean = named
    return clean + [(f"optimizer.parameter{index}", parameter) for index, parameter in enumerate(strangers)]


def plain_name(model: torch.nn.Module, name: str) -> str:
    """The name without what wrappers (DDP, FSDP1, compile, activation checkpointing) put into it."""
    for part in _leading_parts(model):
        name = name.removeprefix(part)
    for part in _TRANSPARENT:
        name = name.replace(part, "")
    return name


def _leading_parts(model: Any) -> Iterator[str]:
    # "module." is stripped only where a wrapper put it: a user's own submodule may have that name.
    while True:
        if type(model).__name__ in _REPLICATING:
            yield "module."
            model = model.module
        elif hasattr(model, "_orig_mod"):
            yield "_orig_mod."
            model = model._orig_mod
        else:
            return


def _layer(name: str, parameter: Any, flat_pieces: dict[int, _FlatPiece]) -> wire.Layer:
    name = name[: wire.MAX_NAME_CHARS]
    piece = flat_pieces.get(id(parameter))
    if piece is not None:
        return wire.Layer(
            name=name, shape=piece.shape, numel=piece.numel, shard=piece.shard, num_shards=piece.num_shards
        )
    shape = tuple(int(size) for size in parameter.shape)
    shard, num_shards = _mesh_shard(parameter) if is_distributed(parameter) else ((), 1)
    return wire.Layer(name=name, shape=shape, numel=math.prod(shape), shard=shard, num_shards=num_shards)


def local_of(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this rank holds: of a DTensor its local tensor, otherwise the tensor itself."""
    local: torch.Tensor = tensor._local_tensor if is_distributed(tensor) else tensor
    return local


def is_distributed(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor. Told by its parts: importing the class costs, and may be impossible."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements")


def is_partial(placement: Any) -> bool:
    """Whether a placement holds terms of a sum, whose squares do not add up to anything."""
    return bool(placement.is_partial())


def _mesh_shard(parameter: Any) -> tuple[tuple[int, ...], int]:
    mesh = parameter.device_mesh
    coordinates = mesh.get_coordinate() or ()
    sharded = [
        (int(coordinate), int(size))
        for coordinate, placement, size in zip(coordinates, parameter.placements, mesh.shape, strict=False)
        if not placement.is_replicate()
    ]
    return tuple(coordinate for coordinate, _ in sharded), math.prod(size for _, size in sharded)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatPiece:
    """What FSDP1 knows about one original parameter."""

    shape: tuple[int, ...]
    numel: int
    shard: tuple[int, ...]
    num_shards: int


def _flat_pieces(model: torch.nn.Module) -> Iterable[tuple[int, _FlatPiece]]:
    """Pieces by `id(parameter)`, for every FSDP1 unit in the model."""
    for module in model.modules():
        handle = getattr(module, "_handle", None)
        flat_parameter = getattr(handle, "flat_param", None)
        if handle is None or flat_parameter is None:
            continue
        group = handle.process_group
        sharded = bool(handle.uses_sharded_strategy)
        shard = (int(group.rank()),) if sharded else ()
        num_shards = int(group.size()) if sharded else 1
        originals = getattr(flat_parameter, "_params", None)
        if originals is None:
            numel = int(flat_parameter._unpadded_unsharded_size.numel())
            yield (
                id(flat_parameter),
                _FlatPiece(shape=(numel,), numel=numel, shard=shard, num_shards=num_shards),
            )
            continue
        for parameter, shape in zip(originals, flat_parameter._shapes, strict=False):
            sizes = tuple(int(size) for size in shape)
            yield (
                id(parameter),
                _FlatPiece(shape=sizes, numel=math.prod(sizes), shard=shard, num_shards=num_shards),
            )
