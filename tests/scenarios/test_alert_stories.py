"""Scenarios of alerts, as a real server tells them: R09, R11, R12, R21, R22, R24, R26, R27, R69, R73, R75, R78.

Where a scenario is of a log that somebody has published, its values here are made after its description.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradiometer as gm
from gradiometer_server.cli import main
from tests.scenarios.asking import ask, ended
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, scalar_schema

PER_FRAME = 200
LOUD = ("warning", "error", "critical")

Columns = Mapping[str, Sequence[float]]


def told(one: Server, run: str, columns: Columns, *, first: int = 0, every: int = 1) -> list[dict[str, Any]]:
    """Alerts of a run of one rank that reports these columns, oldest first."""
    with WireClient(one.url, run) as client:
        client.hello()
        client.send(scalar_schema(*columns))
        rows = dict(enumerate(zip(*columns.values(), strict=True)))
        for start in range(0, len(rows), PER_FRAME):
            part = range(start, min(start + PER_FRAME, len(rows)))
            client.send(frame({first + every * index: rows[index] for index in part}))
        client.send(exit_event())
    ended(one, run)
    return alerts(one, run)


def alerts(one: Server, run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(one, "GET", f"/runs/{run}/alerts")["alerts"]
    return sorted(found, key=lambda alert: (alert["first_step"], alert["rule"]))


def falling(num_steps: int, *, seed: int = 0, noise: float = 0.03) -> list[float]:
    """A usual loss."""
    random = np.random.default_rng(seed)
    step_S = np.arange(num_steps)
    return list(2.0 + 3.0 * np.exp(-step_S / 60) + noise * random.standard_normal(num_steps))


def test_R09_a_scale_that_sinks_below_1_is_one_alert_that_becomes_critical(one: Server) -> None:
    scale = [65536.0] * 30 + [65536.0 / 2**halving for halving in range(1, 19)]
    (alert,) = told(one, "R09", {"scaler/scale": scale})
    assert (alert["rule"], alert["severity"]) == ("scaler_collapse", "critical")
    assert alert["value"] >= 1024  # Well before 1.
    assert alert["count"] > 10


def test_R11_twelve_overflows_in_a_row_are_told_by_the_fourth(one: Server) -> None:
    scale = [0.5] + [0.5 / 2**halving for halving in range(1, 13)]
    (alert,) = told(one, "R11", {"scaler/scale": scale}, first=10_198)
    assert alert["rule"] == "scaler_collapse"
    assert alert["first_step"] <= 10_198 + 4


def test_R12_ordinary_reductions_of_the_scale_frighten_nobody(one: Server) -> None:
    """139 overflows in 7,360 steps, in pairs, as regular as a saw."""
    scale, skipped, current = [], [], 65536.0
    for step in range(7360):
        tooth = step % 106
        overflows = (step < 6) or (step > 100 and tooth in (104, 105))
        current = 2 * current if step > 100 and tooth == 103 else current
        current = current / 2 if step < 6 or (step > 100 and tooth == 105) else current
        scale.append(current)
        skipped.append(float(overflows))
    found = told(one, "R12", {"scaler/scale": scale, "scaler/skipped": skipped, "train/loss": falling(7360)})
    assert [alert for alert in found if alert["severity"] in LOUD] == []
    assert len(found) <= 1
    assert sum(skipped) / len(skipped) == pytest.approx(0.019, abs=0.002)


def test_R21_a_norm_that_is_not_reported_is_no_zero(one: Server) -> None:
    assert told(one, "R21", {"train/loss": falling(100)}) == []


def test_R22_a_model_without_its_weights(one: Server) -> None:
    random = np.random.default_rng(0)
    loss = 11.93 + 0.01 * random.uniform(-1, 1, 600)
    found = told(one, "R22", {"train/loss": list(loss), "grad/norm": [0.0] * 600}, first=1)
    assert [(alert["rule"], alert["severity"]) for alert in found] == [
        ("grad_zero", "error"),
        ("never_learned", "warning"),
    ]
    assert found[0]["first_step"] <= 20
    assert "weights" in found[0]["advice"]


def test_R24_a_loss_of_exactly_0_is_no_success(one: Server) -> None:
    loss = [1.2 - 0.001 * step for step in range(300)] + [0.0] * 200
    (alert,) = told(one, "R24", {"train/loss": loss, "grad/norm": [1.0] * 500})
    assert (alert["rule"], alert["severity"]) == ("loss_zero", "error")
    assert 300 <= alert["first_step"] < 310
    assert "no success" in alert["title"]


def test_R26_a_norm_that_is_no_number_while_the_scale_is_searched(one: Server) -> None:
    scale = [65536.0, 32768.0, 16384.0, *[8192.0] * 97]
    norm = [math.nan] * 3 + [1.0] * 97
    found = told(one, "R26", {"grad/norm": norm, "scaler/scale": scale, "train/loss": falling(100)})
    assert [alert for alert in found if alert["severity"] in LOUD] == []
    norm[60] = math.nan
    (alert,) = told(one, "R26-later", {"grad/norm": norm, "scaler/scale": scale, "train/loss": falling(100)})
    assert (alert["severity"], alert["first_step"]) == ("critical", 60)


def test_R27_a_loss_that_is_no_number_on_another_rank(one: Server) -> None:
    loss = falling(40)
    clients = [WireClient(one.url, "R27", rank=rank, world_size=2) for rank in (0, 1)]
    for rank, client in enumerate(clients):
        with client:
            client.hello()
            values = [math.nan if (rank, step) == (1, 30) else value for step, value in enumerate(loss)]
            client.send(
                scalar_schema("train/loss"),
                frame({step: [value] for step, value in enumerate(values)}),
                exit_event(),
            )
    ended(one, "R27")
    (alert,) = alerts(one, "R27")
    assert (alert["rule"], alert["first_step"], alert["ranks"]) == ("non_finite", 30, [1])
    assert "rank 1" in alert["title"]


def test_R69_a_learning_rate_of_0(one: Server) -> None:
    warm = [1e-4 * min(step, 10) for step in range(100)]
    assert told(one, "R69-first", {"train/lr": warm, "train/loss": falling(100)}) == []
    late = [1e-3 * (step < 80) for step in range(100)]
    (alert,) = told(one, "R69-last", {"train/lr": late, "train/loss": falling(100)})
    assert (alert["rule"], alert["severity"]) == ("lr_anomaly", "info")
    assert "is 0 while training goes on" in alert["title"]


def test_R73_a_condition_that_lasts_is_one_alert(one: Server) -> None:
    loss = falling(1001)
    loss[100:] = [math.nan] * 901
    (alert,) = told(one, "R73", {"train/loss": loss})
    assert (alert["count"], alert["first_step"], alert["last_step"]) == (901, 100, 1000)


def test_R75_a_loss_that_creeps_up_after_a_resume(one: Server) -> None:
    """One value a day. 14 % in two days; calm weeks before."""
    calm = [
        3.76,
        3.29,
        3.12,
        2.98,
        2.94,
        2.9,
        2.87,
        2.82,
        2.8,
        2.77,
        2.73,
        2.7,
        2.66,
        2.63,
        2.6,
        2.58,
        2.56,
        2.55,
    ]
    calm += [2.52, 2.53, 2.5, 2.49, 2.47]
    assert told(one, "R75-calm", {"train/loss": calm}, first=1) == []
    (alert,) = told(one, "R75", {"train/loss": [*calm, 2.58, 2.73, 2.7, 2.67, 2.72, 2.69]}, first=1)
    assert alert["rule"] == "loss_rise"
    assert "resume" in alert["explanation"]


def test_R78_weights_that_become_infinite_are_told_within_two_steps(
    agent: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    log = ["step,loss"]
    with gm.init(run_id="R78") as run:
        run.watch(model, optimizer)
        for step in range(1, 71):
            tokens = torch.randint(0, 64, (8, 12))
            if step == 60:
                with torch.no_grad():
                    model[1].weight[3, 3] = math.inf
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"train/loss": loss})
            log.append(f"{step},{loss.item()}")
    found = eventually(lambda: alerts(agent, "R78"), 30, what="the alert is there")
    first = next(alert for alert in found if alert["rule"] == "non_finite")
    assert first["severity"] == "critical"
    assert 60 <= first["first_step"] <= 61
    # The log that such a script prints says the same to `gradiometer lint`.
    (tmp_path / "char.csv").write_text("\n".join(log))
    assert main(["lint", str(tmp_path / "char.csv"), "--format", "csv"]) == 1
    assert "char,60,train/loss,non_finite,critical" in capsys.readouterr().out
