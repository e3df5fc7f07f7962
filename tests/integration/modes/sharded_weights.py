"""Full weights of wrapped models by plain name, for the reference; collective where the model is sharded."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

FSDP1_PART = "_fsdp_wrapped_module."


@functools.cache
def mesh(*shape, names=None):
    """One mesh per shape and process: each makes process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names or ("data", "tensor")[: len(shape)])


def full(tensor):
    """All of a tensor, whatever holds it."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def gathered(model, prefix=""):
    """Of a model whose parameters are DTensors or plain tensors, without `prefix` in the names."""
    return {name.replace(prefix, "", 1): full(value) for name, value in model.state_dict().items()}


def of_fsdp1(model):
    """Of an FSDP1 model: its state dict is full and has plain names."""
    return {name.replace(FSDP1_PART, ""): full(value) for name, value in model.state_dict().items()}


def from_all_ranks(weights):
    """Union of what the ranks hold; where two hold the same name, the lower rank's."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, weights)
    return {name: value for part in reversed(parts) for name, value in part.items()}


def local_outcome(model, optimizer):
    """All that training changed on this rank: local parts of parameters and of optimizer state."""
    tensors = list(model.parameters())
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors
