"""Names and places of layers, where no process group is needed to see them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradiometer.capture import clip, fsdp1, groups, layout
from gradiometer.capture.clipped import ClippedNorm
from gradiometer.capture.naming import PlainNames


class DistributedDataParallel(nn.Module):
    """Looks like torch's, which needs a process group."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Wrapper(nn.Module):
    """Holds its module as FSDP1, `torch.compile` or activation checkpointing does."""

    def __init__(self, part, module):
        super().__init__()
        self.add_module(part, module)


def plain(model):
    names = PlainNames(model)
    return [names.of(name) for name, _ in model.named_parameters()]


def test_wrappers_leave_no_trace_wherever_they_sit():
    inner = nn.ModuleDict({"module": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    assert plain(inner) == ["module.weight", "b.weight"]
    assert plain(DistributedDataParallel(inner)) == ["module.weight", "b.weight"]
    assert plain(Wrapper("_orig_mod", DistributedDataParallel(inner))) == ["module.weight", "b.weight"]
    assert plain(DistributedDataParallel(Wrapper("_orig_mod", inner))) == ["module.weight", "b.weight"]
    inner["b"] = DistributedDataParallel(Wrapper("_checkpoint_wrapped_module", inner["b"]))
    assert plain(Wrapper("_fsdp_wrapped_module", inner)) == ["module.weight", "b.weight"]


def test_the_name_of_a_module_itself_loses_its_wrapper():
    model = nn.ModuleDict({"a": Wrapper("_fsdp_wrapped_module", nn.Linear(1, 1))})
    assert PlainNames(model).of("a._fsdp_wrapped_module") == "a"
    assert PlainNames(Wrapper("_orig_mod", model)).of("_orig_mod") == ""


def test_names_that_would_collide_keep_their_wrappers():
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)})
    model.add_module("_orig_mod", nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)}))
    optimizer = torch.optim.SGD(model.parameters())
    names = [layer.name for layer in layout.build(model, optimizer, "p.").layers]
    assert names == ["p.a.weight", "p._orig_mod.a.weight"]


# -- plain tensors that differ from rank to rank -----------------------------------------------------------------


class Group:
    """What is used of a process group, or of a one-dimensional mesh."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def test_patterns_place_the_parameters_that_match():
    model = nn.ModuleDict({"experts": nn.Linear(2, 3), "head": nn.Linear(2, 3)})
    optimizer = torch.optim.SGD(model.parameters())
    sharded = {"experts.w*": (2, 4), "experts.*": (1, 2)}
    built = layout.build(model, optimizer, "", sharded)
    found = {layer.name: (layer.shape, layer.numel, layer.shard, layer.num_shards) for layer in built.layers}
    assert found["experts.weight"] == ((4, 3, 2), 24, (2,), 4), "the first pattern that matches"
    assert found["experts.bias"] == ((2, 3), 6, (1,), 2)
    assert found["head.weight"] == ((3, 2), 6, (), 1)
    assert built.notes == ()
    assert built.has_plain_shards, "a norm of these gradients is of this rank alone"


def test_a_pattern_that_matches_nothing_is_told():
    model = nn.Linear(2, 3)
    built = layout.build(model, torch.optim.SGD(model.parameters()), "", {"expert.*": (0, 2)})
    assert built.notes == ("the pattern 'expert.*' of `sharded` matches no parameter, e.g. weight",)


def test_groups_are_asked_for_this_ranks_place():
    mesh = SimpleNamespace(get_group=lambda: Group(1, 2))
    mistakes = []
    given = {"a.*": Group(3, 4), "b.*": mesh, "c.*": None, "d.*": Group(-1, 4), "e.*": "group"}
    assert groups.places(given, mistakes.append) == {"a.*": (3, 4), "b.*": (1, 2)}
    assert [mistake.partition("]")[0] for mistake in mistakes] == [
        "sharded['c.*'",
        "sharded['d.*'",
        "sharded['e.*'",
    ]


# -- FSDP1's flat parameters ---------------------------------------------------------------------------------------


def unit(flat, **metadata):
    """A module with what FSDP1 keeps at a flat parameter."""
    module = nn.Module()
    module._flat_param = flat
    for name, value in metadata.items():
        setattr(flat, name, value)
    group = Group(1, 2)
    module._handle = SimpleNamespace(flat_param=flat, process_group=group, uses_sharded_strategy=True)
    return module


def local(offset, numel):
    return SimpleNamespace(in_shard=numel > 0, offset_in_shard=offset, numel_in_shard=numel)


@pytest.mark.parametrize("hidden", ["_shard_param_infos", "_fqns", "_shapes"])
def test_a_flat_parameter_without_metadata_is_one_layer_with_a_reason(hidden):
    metadata = {
        "_params": None,
        "_fqns": ["a"],
        "_shapes": [torch.Size([3])],
        "_param_infos": [SimpleNamespace(module=nn.Module())],
        "_shard_param_infos": [local(0, 3)],
        "_unpadded_unsharded_size": torch.Size([5]),
    }
    module = unit(nn.Parameter(torch.zeros(3)), **{**metadata, hidden: None})
    built = layout.build(module, torch.optim.SGD(module.parameters()), "")
    (layer,) = built.layers
    assert (layer.name, layer.numel, layer.shard, layer.num_shards) == ("_flat_param", 5, (1,), 2)
    assert ["use_orig_params=True" in note for note in built.notes] == [True]


def test_a_flat_parameter_is_split_and_its_layers_stand_where_their_modules_do():
    head, body = nn.Module(), nn.Linear(2, 2, bias=False)
    module = unit(
        nn.Parameter(torch.zeros(4)),
        _params=None,
        _fqns=["scale", "head.weight"],
        _shapes=[torch.Size([1]), torch.Size([2, 3])],
        _param_infos=[SimpleNamespace(module=None), SimpleNamespace(module=head)],
        _shard_param_infos=[local(None, 0), local(1, 3)],
    )
    module._flat_param._param_infos[0].module = module
    module.body, module.head = body, head
    built = layout.build(module, torch.optim.SGD(module.parameters()), "")
    assert [layer.name for layer in built.layers] == ["scale", "body.weight", "head.weight"]
    assert built.spans == (slice(0, 0), None, slice(1, 4))
    assert [layer.shape for layer in built.layers] == [(1,), (2, 2), (2, 3)]
    assert len(built.owners) == 2
    assert fsdp1.pieces(module)[id(module._flat_param)][1].owner is head


# -- norms that clipping returns -------------------------------------------------------------------------------------


class Spread(torch.Tensor):
    """As a DTensor of older versions of torch, whose norm is the root of the sum of the ranks' squares."""

    _local_tensor = torch.tensor(1.0)
    placements = (SimpleNamespace(is_replicate=lambda: False, is_partial=lambda: True),)


def test_R16_the_norm_of_the_local_shard_is_not_taken_for_the_norm():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    reading = SimpleNamespace(
        partials=object(),
        num_gradients=2,
        witness=SimpleNamespace(gradient=gradients[0]),
        has_plain_shards=False,
        is_scaled=lambda: False,
    )
    told = []
    norm = ClippedNorm(lambda metric, reason: told.append((metric, reason)))
    norm.see([reading], gradients, torch.tensor(3.0), over_ranks=False)
    assert [(column.name, float(value)) for column, value in norm.scalars()] == [("grad/clip_norm", 3.0)]
    norm.see([reading], gradients, torch.tensor(1.0).as_subclass(Spread), over_ranks=False)
    assert norm.scalars() == ()
    assert told == [("grad/clip_norm", clip.SPREAD)]
