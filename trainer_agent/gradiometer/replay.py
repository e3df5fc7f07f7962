"""`gradiometer replay DUMP --with module:function`: runs a saved step again and names what went non-finite first.

The function rebuilds the training's model and says what one step is:

    def build(batch):                        # the first batch of the dump
        model = ...                          # as it was before it was wrapped (DDP, FSDP, compile)
        return model, None, step             # or the optimizer in place of None

    def step(model, batch):                  # called once per micro-batch
        return loss                          # backward() is called on it

The weights come from the dump, and so do the random number generators at the step's first forward.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gradiometer.capture.dump import Manifest
    from gradiometer.capture.first_op import FirstOp, Search, TensorFacts

FOUND, NOT_REPRODUCED, WRONG_USAGE = 0, 1, 2
_MAX_NAMED: Final = 5


class ReplayError(ValueError):
    """The step cannot be run again; the message says why and what to do."""


def main(argv: Sequence[str]) -> int:
    """The command; returns 0: found, 1: nothing non-finite came up, 2: it could not be run."""
    parser = argparse.ArgumentParser(
        prog="gradiometer replay",
        description="Run a step that the flight recorder saved once more, and name the first operation whose result is "
        "not finite. Exit code 0: found, 1: not reproduced, 2: it could not be run.",
    )
    parser.add_argument("dump", type=Path, metavar="DUMP", help="folder of a dump, with manifest.json in it")
    parser.add_argument(
        "--with",
        dest="function",
        required=True,
        metavar="MODULE:FUNCTION",
        help="returns (model, optimizer, step)",
    )
    parser.add_argument(
        "--rank", type=int, metavar="R", help="whose batch to run (the rank where it went wrong)"
    )
    parser.add_argument("--device", default="cpu", metavar="DEVICE", help="where to run it (cpu)")
    arguments = parser.parse_args(list(argv))
    if _import_torch() is None:
        sys.stderr.write("gradiometer: replay needs torch, which is not installed here.\n")
        return WRONG_USAGE
    from gradiometer.capture.dump import DumpError

    try:
        return replay(arguments.dump, arguments.function, rank=arguments.rank, device=arguments.device)
    except (ReplayError, DumpError) as error:
        sys.stderr.write(f"gradiometer: {error}\n")
        return WRONG_USAGE


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def replay(folder: Path, function: str, *, rank: int | None, device: str) -> int:
    """Run the step of a dump and print what was found; returns the exit code.

    Raises:
        ReplayError, DumpError: it could not be run.
    """
    from gradiometer.capture import dump

    manifest = dump.read_manifest(folder)
    rank = manifest.trigger_rank if rank is None else rank
    if not 0 <= rank < manifest.world_size:
        raise ReplayError(f"--rank {rank}: the dump is of {manifest.world_size} ranks, counted from 0.")
    _say(f"step {manifest.step} of run {manifest.run_id}: {manifest.reason} on rank {manifest.trigger_rank}")
    build = load_function(function)
    own = dump.read_rank(folder, rank)
    batches = _moved(own["batches"], device)
    model, optimizer, step = _built(build, batches[0] if batches else None, function)
    with tempfile.TemporaryDirectory() as scratch:
        _load_weights(model, optimizer, dump.read_state(folder, Path(scratch)), manifest)
    model.to(device)
    dump.restore_random_state(own["random"])
    search, outcome = _run(model, step, batches or [None])
    return _report(search, outcome, model)


def load_function(name: str) -> Callable[..., Any]:
    """The function behind `module:function`, the module looked for in the working directory too.

    Raises:
        ReplayError: there is none.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ReplayError(f"--with {name!r}: write it as module:function, for example train:build.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ReplayError(f"--with {name!r}: {module_name} cannot be imported: {error}.") from error
    except AttributeError as error:
        raise ReplayError(f"--with {name!r}: {module_name} has no {attribute}.") from error
    if not callable(found):
        raise ReplayError(f"--with {name!r}: {attribute} is not a function.")
    function: Callable[..., Any] = found
    return function


def _built(build: Callable[..., Any], batch: Any, name: str) -> tuple[Any, Any, Callable[..., Any]]:
    import torch

    built = build(batch)
    if not isinstance(built, tuple) or len(built) != 3 or not isinstance(built[0], torch.nn.Module):
        raise ReplayError(
            f"{name} must return (model, optimizer or None, step), step(model, batch) giving the loss."
        )
    if not callable(built[2]):
        raise ReplayError(
            f"{name} must return a function in third place: step(model, batch), giving the loss."
        )
    return built


def _load_weights(model: Any, optimizer: Any, state: dict[str, Any], manifest: Manifest) -> None:
    try:
        model.load_state_dict(state["model"])
    except (RuntimeError, KeyError) as error:
        raise ReplayError(f"the weights of the dump do not fit the model: {error}") from error
    if optimizer is None or "optimizers" not in state:
        return
    try:
        if manifest.world_size == 1:
            optimizer.load_state_dict(state["optimizers"]["0"])
        else:
            from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

            set_optimizer_state_dict(model, optimizer, state["optimizers"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ReplayError(f"the optimizer's state does not fit: {error} Return None in its place.") from error


def _moved(value: Any, device: str) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    try:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
    except (RuntimeError, AssertionError) as error:
        raise ReplayError(f"--device {device}: {error}") from error


def _run(model: Any, step: Callable[..., Any], batches: list[Any]) -> tuple[Search, str]:
    """Forward and backward of every micro-batch; the search, and what was not finite in the end (in words)."""
    import torch

    from gradiometer.capture.first_op import Finder, Modules, Search, is_finite

    search, modules = Search(), Modules(model)
    _name_all(search, model, batches)
    model.train()
    model.zero_grad(set_to_none=True)
    losses = []
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False), Finder(search, modules):
            for batch in batches:
                loss = step(model, batch)
                losses.append(_checked_loss(loss))
                loss.backward()
    finally:
        modules.close()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not is_finite([loss.detach() for loss in losses]):
        return search, "the loss"
    return search, "" if is_finite(gradients) else "a gradient"


def _checked_loss(loss: Any) -> Any:
    import torch

    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        raise ReplayError("step(model, batch) must return the loss: a tensor of one element with a gradient.")
    return loss


def _name_all(search: Search, model: Any, batches: list[Any]) -> None:
    for name, parameter in model.named_parameters():
        search.name(parameter, name, is_weight=True)
    for name, buffer in model.named_buffers():
        search.name(buffer, name)
    for name, tensor in _batch_tensors(batches):
        search.name(tensor, name)


def _batch_tensors(batches: list[Any]) -> Iterator[tuple[str, Any]]:
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path

    for path, leaf in tree_flatten_with_path(batches)[0]:
        if isinstance(leaf, torch.Tensor):
            yield f"batch{keystr(path)}", leaf


def _report(search: Search, outcome: str, model: Any) -> int:
    from gradiometer.capture.first_op import is_finite

    bad = [name for name, parameter in model.named_parameters() if not is_finite([parameter])]
    if bad:
        more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
        _say(f"weights that are not finite in the dump: {', '.join(bad[:_MAX_NAMED])}{more}")
    if not outcome or search.found is None:
        _say(f"not reproduced: {search.num_ops} operations, loss and gradients are finite")
        return NOT_REPRODUCED
    _say(f"reproduced: {outcome} is not finite")
    _print_op(search.found)
    return FOUND


def _print_op(found: FirstOp) -> None:
    node = f" ({found.node})" if found.node else ""
    _say(f"first operation: {found.op}{node}, {found.phase}, in {found.module or '(outside the model)'}")
    if found.received:
        _say(f"  it received a value that was not finite already: {found.received}")
    if found.place:
        _say(f"  at {found.place}")
    for index, facts in enumerate(found.inputs):
        _say(f"  input {index}: {_text(facts)}")
    _say(f"  output: {_text(found.output)}")


def _text(facts: TensorFacts) -> str:
    extent = "no finite element" if facts.low is None else f"from {facts.low:.6g} to {facts.high:.6g}"
    bad = f", {facts.num_nan} NaN, {facts.num_inf} infinite" if facts.num_nan or facts.num_inf else ""
    name = f" {facts.name}" if facts.name else ""
    return f"{facts.dtype} {list(facts.shape)}{name}: {extent}{bad}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
