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


def test_R74_one_bad_micro_batch_of_eight_is_an_alert_and_does_not_hide_the_others(
    server: Callable[..., Server], spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = server()
    monkeypatch.setenv("GRADIOMETER_URL", one.url)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with gm.init(run_id="micro") as run:
        run.watch(model, optimizer)
        for step in range(1, 31):
            for index in range(8):
                loss = model(torch.randn(3, 4)).square().mean()
                (loss / 8).backward()
                run.log_microbatch({"train/loss": float("nan") if (step, index) == (20, 3) else loss})
            optimizer.step()
            optimizer.zero_grad()
    (alert,) = eventually(lambda: one.get("/runs/micro/alerts")["alerts"], 30, what="the alert is there")
    assert (alert["rule"], alert["metric"], alert["first_step"]) == ("non_finite", "train/loss", 20)
    names = ("train/loss_finite_mean", "train/loss_num_nonfinite")
    query = {"series": [{"run": "micro", "metric": name} for name in names]}
    finite, bad = one.post("/series/query", query)["series"]
    assert all(value > 0 for value in finite["points"]["mean"])
    assert sum(bad["points"]["mean"]) == 1.0
