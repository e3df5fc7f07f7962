"""Which part of which parameter this rank holds, and what is a replica: the layers of a source.

Works without a collective. The shard key holds this rank's mesh coordinates on sharded dimensions only, so that two
ranks with equal keys hold equal copies, also where a parameter lives on a sub-mesh (FSDP2 with tensor parallelism).
DTensors (FSDP2, HSDP, tensor parallelism) say all this themselves, FSDP1 keeps it in its flat parameters, and of
plain tensors that differ from rank to rank (expert parallelism) only the user knows.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from gradiometer import wire
from gradiometer.capture import fsdp1, layer_names
from gradiometer.capture.naming import PlainNames

Places = Mapping[str, tuple[int, int]]
"""Pattern of plain parameter names -> (rank, size) of the group whose ranks hold different values under those names."""

_NO_NAMES: Final = (
    "this version of torch hides which parameters are in FSDP's flat ones, which are therefore shown as one layer each; "
    "use_orig_params=True gives every parameter its own"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The layers of one watch, in depth order, and the parameters behind them.

    Attributes:
        layers: as declared on the wire.
        parameters: the parameter whose gradient holds each layer; one may hold several.
        spans: where in that gradient, flattened, the layer is; None: everywhere.
        owners: the distinct parameters, the smallest first.
        placements: parameters whose gradient is a DTensor, and its placements as declared.
        updated: the parameters that the optimizer had when this was built: others need a new layout.
        has_plain_shards: whether some local gradient is a shard but does not say so, as a DTensor does.
        notes: what could not be found out, and why.
    """

    layers: tuple[wire.Layer, ...]
    parameters: tuple[torch.Tensor, ...]
    updated: tuple[torch.Tensor, ...]
    spans: tuple[slice | None, ...] = ()
    owners: tuple[torch.Tensor, ...] = ()
    placements: tuple[tuple[torch.Tensor, Any], ...] = ()
    has_plain_shards: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_one_to_one(self) -> bool:
        """Whether every layer is all of its parameter's gradient."""
        return self.spans.count(None) == len(self.spans)

    # Hot path: training thread, once per step.
    def is_outdated(self) -> bool:
        """Whether the gradients of some layer are now spread over the ranks in another way than was declared."""
        for parameter, declared in self.placements:
            placements = getattr(parameter.grad, "placements", declared)
            if placements is not declared and placements != declared:
                return True
        return False


class LayoutError(ValueError):
    """The parameters of an optimizer cannot be laid out; the message says why."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Found:
    """One layer before it is declared."""

    name: str
    full_name: str
    parameter: torch.Tensor
    order: int = 0
    piece: fsdp1.FlatPiece | None = None
    place: tuple[int, int] | None = None


def build(
    model: torch.nn.Module,
    optimizer: Any,
    prefix: str,
    sharded: Places | None = None,
    others: Iterable[Layout] = (),
) -> Layout:
    """Layers of the parameters that `optimizer` updates, in the order of the plain model's `named_parameters()`.

    Called at the first step, not at `watch`: `fully_shard` replaces the parameter objects, and the gradients say
    more than the parameters. `others` are the layouts of the run's other watches, whose names are not given again.

    Raises:
        LayoutError: no parameter of the model is in the optimizer, or there are more layers than the wire allows.
    """
    updated = list(updated_by(optimizer))
    found = _found(model, updated)
    if len(found) > wire.MAX_COLUMNS:
        raise LayoutError(
            f"the optimizer has {len(found)} parameters; at most {wire.MAX_COLUMNS} can be followed"
        )
    notes = _assign_places(found, sharded or {})
    if any(one.name.endswith(fsdp1.FLAT_NAME) for one in found):
        notes.append(_NO_NAMES)
    others = tuple(others)
    names = layer_names.of_layers([one.name for one in found], prefix, others, notes)
    parameters = tuple(one.parameter for one in found)
    spans = tuple(None if one.piece is None else one.piece.span for one in found)
    shared = layer_names.shared_with(parameters, spans, names, others, notes)
    layers = tuple(_layer(name, also, one) for name, also, one in zip(names, shared, found, strict=True))
    return Layout(
        layers=layers,
        parameters=parameters,
        updated=tuple(updated),
        spans=spans,
        owners=tuple(
            sorted({id(one.parameter): one.parameter for one in found}.values(), key=torch.Tensor.numel)
        ),
        placements=tuple(
            (one.parameter, _placements(one.parameter)) for one in found if is_distributed(one.parameter)
        ),
        has_plain_shards=any(
            layer.num_shards > 1 and not is_distributed(one.parameter)
            for layer, one in zip(layers, found, strict=True)
        ),
        notes=tuple(notes),
    )


def updated_by(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters that the optimizer updates now."""
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


# Hot path: training thread, a few times per step. Must not compare tensors by value.
def updates(optimizer: Any, known: tuple[torch.Tensor, ...]) -> bool:
    """Whether the optimizer updates these very parameters, in this order (25 us for 2000)."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    return count == len(known) and all(map(operator.is_, updated_by(optimizer), known))


def _found(model: torch.nn.Module, updated: list[torch.Tensor]) -> list[_Found]:
    wanted = {id(parameter) for parameter in updated}
    named = [(name, value) for name, value in model.named_parameters() if id(value) in wanted]
    if not named:
        raise LayoutError(
            "none of the model's parameters is in the optimizer: pass the model that the optimizer was built from"
        )
    names, pieces = PlainNames(model), fsdp1.pieces(model)
    places = {path: (order, module) for order, (path, module) in enumerate(model.named_modules())}
    orders = {id(module): order for order, module in places.values()}
    found: list[_Found] = []
    for name, parameter in named:
        path = name.rpartition(".")[0]
        order = places[path][0] if path in places else 0
        found += _layers_in(names, name, parameter, order, pieces.get(id(parameter), ()), orders)
    # A flat parameter comes before all modules of its unit; sorting is stable, so nothing else moves.
    found.sort(key=lambda one: one.order)
    if len({one.name for one in found}) < len(found):
        for one in found:
            one.name = one.full_name
    known = {id(parameter) for _, parameter in named}
    strangers = [parameter for parameter in updated if id(parameter) not in known]
    for index, stranger in enumerate(strangers):
        name = f"optimizer.parameter{index}"
        found.append(_Found(name=name, full_name=name, parameter=stranger))
    return found


def _layers_in(
    names: PlainNames,
    name: str,
    parameter: torch.Tensor,
    order: int,
    pieces: tuple[fsdp1.FlatPiece, ...],
    orders: Mapping[int, int],
) -> Iterator[_Found]:
    """The layers in one parameter: itself, or the originals in a flat one."""
    unit = name.removesuffix(fsdp1.FLAT_NAME)
    for piece in pieces or (None,):
        full_name = name if piece is None or piece.name is None else unit + piece.name
        yield _Found(
            name=names.of(full_name),
            full_name=full_name,
            parameter=parameter,
            order=order if piece is None else orders.get(id(piece.owner), order),
            piece=piece,
        )


def _assign_places(found: list[_Found], sharded: Places) -> list[str]:
    """Say of each layer which of the user's patterns it matches first; returns what to tell the user."""
    notes = []
    for pattern, place in sharded.items():
        matching = [one for one in found if fnmatch.fnmatchcase(one.name, pattern)]
        if not matching:
            notes.append(f"the pattern {pattern!r} of `sharded` matches no parameter, e.g. {found[0].name}")
        for one in matching:
            one.place = one.place or place
    return notes


def _layer(name: str, same_as: str, found: _Found) -> wire.Layer:
    parameter: Any = found.parameter
    if found.piece is not None:
        shape, shard, num_shards = found.piece.shape, found.piece.shard, found.piece.num_shards
    else:
        shape = tuple(int(size) for size in parameter.shape)
        shard, num_shards = _mesh_shard(parameter) if is_distributed(parameter) else ((), 1)
    if found.place is not None:
        # One parameter of the size of all ranks' together.
        rank, size = found.place
        shape, shard, num_shards = (size, *shape), (rank, *shard), size * num_shards
    return wire.Layer(
        name=name,
        shape=shape,
        numel=math.prod(shape),
        shard=shard,
        num_shards=num_shards,
        same_as=same_as,
    )


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


def _placements(parameter: Any) -> Any:
    """Placements of the gradient, which need not be the parameter's; of the parameter where there is none yet."""
    gradient = parameter.grad
    return getattr(parameter if gradient is None else gradient, "placements", None)


def _mesh_shard(parameter: Any) -> tuple[tuple[int, ...], int]:
    mesh = parameter.device_mesh
    coordinates = mesh.get_coordinate() or ()
    placements = _placements(parameter)
    sharded = [
        (int(coordinate), int(size))
        for coordinate, placement, size in zip(coordinates, placements, mesh.shape, strict=False)
        # A Partial gradient is not read; what it belongs to is whole on every rank.
        if not placement.is_replicate() and not is_partial(placement)
    ]
    return tuple(coordinate for coordinate, _ in sharded), math.prod(size for _, size in sharded)
