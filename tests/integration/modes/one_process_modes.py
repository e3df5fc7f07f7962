"""Modes of one process."""

from __future__ import annotations

import torch

from tests.integration.modes.mode_framework import Mode, Session, outcome, weights_of
from tests.integration.modes.mode_net import loss_of, make_net

ONCE = "the gradient, once per optimizer step"
STEPS = 3


def plain(session: Session):
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.watch(model, optimizer)
    for step in range(1, STEPS + 1):
        session.begin_step(weights_of(model))
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return outcome(model, optimizer)


MODES = [Mode(name="plain", train=plain, reads=ONCE)]
