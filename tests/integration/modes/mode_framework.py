"""What a mode is, and what its training loop talks to; used inside the training processes.

A mode is a small real training loop. It runs twice in the same processes with the same seed: without the agent and
with it. In the second run it says at the start of every step which weights the model has, and afterwards the full
gradient of each step is computed from them by a plain model in one process: no wrapper, no shards, no compilation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture import statistics
from tests.integration.modes.mode_net import loss_of, make_net

Gradients = Mapping[str, torch.Tensor | None]
"""By layer name as it must be reported; None: the layer is reported without a gradient (count 0)."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way of training.

    Attributes:
        name: its row in docs/modes.md.
        train: the loop; returns the tensors that must end up bit-identical (this rank's weights, optimizer state).
        reads: what is read, for the table: "the gradient before clipping, once per optimizer step", ...
        remarks: what a user must know, for the table.
        steps: optimizer steps that the loop makes (the run's clock), skipped ones included.
        world_size: number of processes.
        make: the plain model of the reference.
        micro_batches: per step and rank, for the default reference.
        ranks: how many ranks have data of their own, for the default reference; None: all.
        reference: (step, full weights by plain name) -> gradients, instead of the default.
        tolerance: largest relative error of a norm.
        element_tolerance: largest error of mean, min and max, as a share of the gradient's rms (mean) or largest
            magnitude (min, max).
        unavailable: metrics that must be told as unavailable.
        tiers: options of `watch` with which the weights must be the same too.
        findings: names of the exact checks that this loop fails; all other checks must be silent.
        replicas_identical: whether ranks with the same shard key must report the same bits.
    """

    name: str
    train: Callable[[Session], Iterable[torch.Tensor]]
    reads: str
    remarks: str = ""
    steps: int = 3
    world_size: int = 1
    make: Callable[[], nn.Module] = make_net
    micro_batches: int = 1
    ranks: int | None = None
    reference: Callable[[int, dict[str, torch.Tensor]], Gradients] | None = None
    tolerance: float = 1e-5
    element_tolerance: float = 1e-5
    unavailable: tuple[str, ...] = ()
    tiers: tuple[dict[str, object], ...] = ()
    findings: tuple[str, ...] = ()
    replicas_identical: bool = True

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return "".join(char if char.isalnum() else "-" for char in self.name.lower())

    def gradients(self, step: int, weights: dict[str, torch.Tensor]) -> Gradients:
        """The full gradient of one step, from a plain model with these weights."""
        if self.reference is not None:
            return self.reference(step, weights)
        model = self.make()
        model.load_state_dict(weights)
        num_ranks = self.world_size if self.ranks is None else self.ranks
        for rank in range(num_ranks):
            for micro_batch in range(self.micro_batches):
                loss = loss_of(model, step, rank, micro_batch)
                (loss / (num_ranks * self.micro_batches)).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}


@dataclass
class Session:
    """The mode's link to the outside; `run` is None in the run without the agent."""

    mode: Mode
    run: gm.Run | None
    rank: int = 0
    world_size: int = 1
    options: dict[str, object] = field(default_factory=lambda: {"statistics": "full"})
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    expected: dict[int, Gradients] = field(default_factory=dict)
    notes: dict[str, object] = field(default_factory=dict)
    """Anything JSON can carry that a test of this mode wants to look at."""

    def watch(self, model, optimizers, scaler=None, **options):
        """`Run.watch` with everything in every step (or another tier), or nothing."""
        if self.run is not None:
            self.run.watch(model, optimizers, scaler, **{**self.options, **options})

    def log(self, metrics, step=None):
        """`Run.log`, or nothing."""
        if self.run is not None:
            self.run.log(metrics, step)

    def begin_step(self, weights):
        """The full weights by plain name (a `state_dict`) before the forward pass of the next step.

        Call it in both runs, on all ranks, if gathering them is collective.
        """
        step = len(self.weights) + 1
        self.weights[step] = {name: value.detach().clone() for name, value in weights.items()}

    def expect(self, step: int, gradients: Gradients) -> None:
        """Instead of `begin_step`, where the loop knows better: the full gradient of this step."""
        self.expected[step] = {
            name: None if gradient is None else gradient.detach().clone()
            for name, gradient in gradients.items()
        }


def play(mode: Mode, folder: Path, *, rank: int = 0) -> None:
    """Run `mode` without and with the agent and write `<folder>/<slug>.rank<k>.json`."""
    bare = Session(mode=mode, run=None, rank=rank, world_size=mode.world_size)
    said = {"name": mode.name, "bare": digest(_train(bare))}
    with gm.init(mode="offline", project="modes", name=mode.name) as run:
        directory = str(run.directory)
        watched = Session(mode=mode, run=run, rank=rank, world_size=mode.world_size)
        said["watched"] = digest(_train(watched))
        said["step"] = run.step
    for options in mode.tiers:
        with gm.init(mode="offline", project="modes", name=f"{mode.name}, {options}") as other:
            session = Session(mode=mode, run=other, rank=rank, world_size=mode.world_size, options=options)
            assert digest(_train(session)) == said["bare"], f"the agent changed the training: {options}"
        assert other.failures == {}
    said |= {
        "directory": directory,
        "failures": run.failures,
        "dropped": run.dropped,
        "notes": watched.notes,
        "notes_bare": bare.notes,
        "expected": _rows(watched) if rank == 0 else {},
    }
    (folder / f"{mode.slug}.rank{rank}.json").write_text(json.dumps(said))


def _train(session: Session) -> list[torch.Tensor]:
    torch.manual_seed(1234)
    return [tensor.detach() for tensor in session.mode.train(session)]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 over all bits, and over the state of the random number generator."""
    sha = hashlib.sha256()
    for tensor in [*tensors, torch.get_rng_state()]:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.layout != torch.strided:
            local = local.to_dense()
        sha.update(local.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()


def _rows(session: Session) -> dict[int, dict[str, list[float] | None]]:
    """Step -> layer -> row of statistics of the full gradient, in float64."""
    expected = dict(session.expected)
    for step, weights in session.weights.items():
        expected.setdefault(step, session.mode.gradients(step, weights))
    return {
        step: {name: None if value is None else _row(value) for name, value in gradients.items()}
        for step, gradients in expected.items()
    }


def _row(gradient: torch.Tensor) -> list[float]:
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return [float(value) for value in statistics.exact(dense.detach().to(torch.float64).numpy())]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of a model that is not wrapped."""
    return dict(model.state_dict())


def outcome(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that training changed: weights, buffers, optimizer state."""
    tensors = list(model.state_dict().values())
    for optimizer in optimizers:
        for state in optimizer.state_dict()["state"].values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors
