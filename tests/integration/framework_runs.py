"""What the tests of the framework integrations share: what a run recorded, as one number per step."""

from __future__ import annotations

import hashlib
import math

import torch

from gradiometer.capture.statistics import SUM_SQUARES
from tests.support.recorded import Recorded, recorded


def finished(run) -> Recorded:
    """Finish a run of which nothing was lost; returns what it recorded."""
    run.finish()
    assert run.failures == {}
    assert run.dropped == {}
    return recorded(run.directory)


def norms(out: Recorded) -> dict[int, float]:
    """Step -> norm of the whole gradient."""
    squares: dict[int, float] = {}
    for rows in out.layers.values():
        for step, row in rows.items():
            squares[step] = squares.get(step, 0.0) + row[SUM_SQUARES]
    return {step: math.sqrt(square) for step, square in sorted(squares.items())}


def marks(out: Recorded) -> list[tuple[str, int | None]]:
    """Markers in order, with their steps."""
    return [(event.attributes["name"], event.step) for event in out.of_kind("marker")]


def digest(module: torch.nn.Module) -> str:
    """Of all bits of the weights and of the random numbers to come."""
    sha = hashlib.sha256()
    for tensor in [*module.state_dict().values(), torch.get_rng_state()]:
        sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
