"""A mistake in a real training loop becomes an alert on a real server, with its own title and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradiometer as gm
from tests.support.eventually import eventually
from tests.support.server import Server


def test_a_missing_zero_grad_is_an_alert(
    server: Callable[..., Server], spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = server()
    monkeypatch.setenv("GRADIOMETER_URL", one.url)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with gm.init(run_id="stale") as run:
        run.watch(model, optimizer)
        for _ in range(15):
            loss = model(torch.randn(3, 4)).square().mean()
            run.log({"train/loss": loss})
            loss.backward()
            optimizer.step()
    (alert,) = eventually(lambda: one.get("/runs/stale/alerts")["alerts"], 30, what="the alert is there")
    assert (alert["rule"], alert["severity"], alert["state"]) == ("check", "error", "firing")
    assert alert["title"] == "Gradients are not cleared between optimizer steps"
    assert alert["first_step"] == 2
    assert alert["advice"].startswith("Call optimizer.zero_grad()")
    assert "run.alert" not in alert["advice"] + alert["explanation"]
    eventually(
        lambda: "True at least 10 times" in one.get("/runs/stale/alerts")["alerts"][0]["explanation"],
        30,
        what="the count goes on",
    )
    assert one.get("/runs/stale")["alerts"] == {"firing": 1, "total": 1}
