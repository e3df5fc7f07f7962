"""What the tests of the framework integrations share: what a run recorded, as one number per step."""

from __future__ import annotations

import hashlib
import math

import torch

from gradiometer import wire
from tests.support.recorded import Recorded, recorded


def finished(run, *, mistakes: tuple[str, ...] = ()) -> Recorded:
    """Finish a run of which nothing was lost; returns what it recorded. A framework's own loop makes no `mistakes`."""
    run.finish()
    assert run.failures == {}
    assert run.dropped == {}
    out = recorded(run.directory)
    found = [event.attributes for event in out.of_kind("check")]
    assert {check["check"] for check in found} == set(mistakes), found
    return out


# Which statistics are read in a step depends on whether there is a compiled kernel; these are always among them.
PLACES = {len(names): names.index("sum_squares") for names in (wire.STATISTICS, wire.NORM_STATISTICS)}


def norms(out: Recorded) -> dict[int, float]:
    """Step -> norm of the whole gradient."""
    squares: dict[int, float] = {}
    for rows in out.layers.values():
        for step, row in rows.items():
            squares[step] = squares.get(step, 0.0) + row[PLACES[len(row)]]
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
