"""What is compiled is told by what it is, not by the names of its attributes."""

from __future__ import annotations

import torch
from torch import nn

import gradiometer as gm
from gradiometer.capture.compiled import is_compiled
from tests.support.recorded import recorded


class Wrapper(nn.Module):
    """A module of the user's own that happens to call what it wraps as torch.compile does."""

    def __init__(self):
        super().__init__()
        self._orig_mod = nn.Linear(2, 1)

    def forward(self, x):
        return self._orig_mod(x)


def test_compiled_modules_are_told_from_others():
    assert not is_compiled(Wrapper())
    assert is_compiled(torch.compile(nn.Linear(2, 1), backend="eager"))
    in_place = nn.Linear(2, 1)
    assert not is_compiled(in_place)
    in_place.compile(backend="eager")
    assert is_compiled(in_place)


def test_the_flight_recorder_sees_what_a_wrapper_is_called_with(tmp_path):
    model = Wrapper()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gm.init(mode="offline", spool=tmp_path, flight_recorder=True) as run:
        run.watch(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert "flight recorder" not in recorded(run.directory).unavailable()
