"""One dump on disk: everything that one training step was computed from, in files that need no trust to be read.

    step-00000280/
        manifest.json         what happened, and what is in the other files
        rank-00000.pt ...     of each rank: batches, state of the random number generators, scaler
        state.pt              model and optimizers of a single process (`torch.save`)
        state/                of several ranks together (`torch.distributed.checkpoint`)

All `.pt` files hold tensors, numbers, strings and containers alone, so that `torch.load(weights_only=True)` reads them.
"""

from __future__ import annotations

import json
import pickle
import platform
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from gradiometer.capture.naming import PlainNames

VERSION: Final = 1
MANIFEST: Final = "manifest.json"
STATE_FILE: Final = "state.pt"
STATE_FOLDER: Final = "state"
_MAX_DEPTH: Final = 16


class DumpError(ValueError):
    """A dump cannot be written or read; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a dump is of.

    Attributes:
        step: the step that went wrong; the state is that before its update.
        reason: in words. `trigger`: `gradient`, `output`, `loss` or `server`. `trigger_rank`: the lowest rank that saw it.
        batch: `recorded` by the user, what the `forward` was called with, or `none`.
        left_out: what could not be saved, by place, and why.
    """

    version: int
    run_id: str
    step: int
    reason: str
    trigger: str
    trigger_rank: int
    time: float
    host: str
    world_size: int
    batch: str
    num_batches: int
    torch: str = torch.__version__
    python: str = platform.python_version()
    left_out: Mapping[str, str] = field(default_factory=dict)


def rank_file(rank: int) -> str:
    """Name of the file of one rank."""
    return f"rank-{rank:05d}.pt"


def plain(value: Any, left_out: dict[str, str], path: str, depth: int = 0) -> Any:
    """`value` as far as it consists of tensors, numbers, strings and containers; the rest is noted in `left_out`."""
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, left_out, path)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.array(value))
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        keys = [key for key in value if type(key) in (str, int)]
        if len(keys) < len(value):
            left_out[path] = "keys that are neither strings nor integers"
        return {key: plain(value[key], left_out, f"{path}.{key}", depth + 1) for key in keys}
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
        items = [plain(item, left_out, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    left_out[path] = f"{kind} is neither a tensor, a number, a string nor a container of these"
    return None


def _plain_tensor(tensor: Any, left_out: dict[str, str], path: str) -> Any:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        left_out[path] = f"{type(tensor).__qualname__} is not a plain tensor"
        return None
    found: torch.Tensor = tensor.detach()
    if found.layout == torch.strided and found.untyped_storage().nbytes() > found.nbytes:
        # Saving a view saves all that lies behind it.
        found = found.clone()
    return found


def random_state() -> dict[str, Any]:
    """States of all generators of this process, as plain values. Costs no wait for a device."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        state["cuda"] = cuda.get_rng_state_all()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Inverse of `random_state`; generators of devices that are not here are left alone."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


def local_state(
    model: torch.nn.Module, optimizers: Sequence[Any], left_out: dict[str, str]
) -> dict[str, Any]:
    """Model and optimizers of a single process."""
    names = PlainNames(model)
    weights = {names.of(name): value for name, value in model.state_dict().items()}
    states = {str(index): one.state_dict() for index, one in enumerate(optimizers)}
    return {
        "model": plain(weights, left_out, "model"),
        "optimizers": plain(states, left_out, "optimizers"),
    }


def sharded_state(model: torch.nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Model and optimizers of all ranks together, whatever wraps them, by name. Every rank must call it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    # Of an optimizer without a state torch would make one by taking a step.
    if all(optimizer.state for optimizer in optimizers):
        state["optimizers"] = get_optimizer_state_dict(model, list(optimizers))
    return state


def state_bytes(model: torch.nn.Module, optimizers: Sequence[Any]) -> int:
    """About how much this rank will write."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        if isinstance(state, Mapping)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises `DumpError` where the dump would not fit; a full disk would end the training's own checkpoints."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 1.1 * needed_bytes + 2**26:
        raise DumpError(
            f"{folder} has {free_bytes / 2**20:.0f} MiB free, about {needed_bytes / 2**20:.0f} are needed"
        )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Raises `OSError`."""
    text = json.dumps(asdict(manifest), indent=1, default=str)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """What a dump is of. Raises `DumpError`."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["version"]
        if version != VERSION:
            raise DumpError(
                f"{path} is of version {version}, this program reads {VERSION}: upgrade gradiometer."
            )
        known = {name: found[name] for name in Manifest.__dataclass_fields__ if name in found}
        return Manifest(**known)
    except OSError as error:
        raise DumpError(f"{folder} is no dump: {error.strerror or error} ({path.name}).") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"{path} is damaged: {error!r}.") from error


def read_rank(folder: Path, rank: int) -> dict[str, Any]:
    """Batches, generators and scaler of one rank. Raises `DumpError`."""
    return _load(folder / rank_file(rank))


def read_state(folder: Path, scratch: Path) -> dict[str, Any]:
    """Model and optimizers, whole. `scratch`: a folder for a file of about that size. Raises `DumpError`."""
    if (folder / STATE_FILE).exists():
        return _load(folder / STATE_FILE)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = scratch / STATE_FILE
    try:
        dcp_to_torch_save(folder / STATE_FOLDER, whole)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise DumpError(f"{folder / STATE_FOLDER} cannot be put together: {error}") from error
    return _load(whole)


def _load(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise DumpError(f"{path} is missing.") from error
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise DumpError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DumpError(f"{path} does not hold what a dump holds.")
    return found


def folder_bytes(folder: Path) -> int:
    """Size of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
