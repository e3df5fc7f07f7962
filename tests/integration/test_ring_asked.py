"""The ring and the server: it asks for it when a grave alert opens, keeps it once, and refuses what is no ring."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch

import gradiometer as gm
from gradiometer import wire
from gradiometer.demo.data import standard_library_text
from gradiometer.demo.model import LanguageModel, ModelConfig
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, layer_schema, scalar_schema

LAYERS = (("a", 3), ("b", 2))
WIDTH = len(LAYERS) * len(wire.STATISTICS)


def table(norm_a: float, norm_b: float) -> tuple[float, ...]:
    """One step of layer statistics whose norms are these."""
    return (
        3.0,
        0.0,
        norm_a**2,
        -1.0,
        1.0,
        0.0,
        0.0,
        2.0,
        0.0,
        norm_b**2,
        -1.0,
        1.0,
        0.0,
        float(math.isnan(norm_b)),
    )


def detail(rows: dict[int, tuple[float, ...]], *, schema_id: int = 2, trigger_step: int = 5) -> bytes:
    values = [value for row in rows.values() for value in row]
    return wire.encode(
        wire.Detail(
            kind="ring", reason="a gradient is not finite", trigger_step=trigger_step, schema_id=schema_id,
            steps=tuple(rows), times=tuple(1.8e9 + step for step in rows),
            values=struct.pack(f"<{len(values)}d", *values),
        )
    )  # fmt: skip


def user_alert(severity: str, title: str = "look at this") -> bytes:
    attributes = {"title": title, "text": "", "severity": severity}
    return wire.encode(wire.Event(kind="alert", time=time.time(), step=5, attributes=attributes))


def hello_of(client: WireClient, *commands: str) -> wire.Hello:
    return wire.Hello(
        protocol=1, agent_version="test", run=client.run, sources=(client.source,), commands=commands
    )


def test_details_are_kept_per_rank_beside_the_merged_layers_and_once(
    server: Callable[..., Server], database_url: str
) -> None:
    one = server(database_url)
    rows = {step: table(float(step), 2.0 * step) for step in (3, 4)} | {5: table(5.0, math.nan)}
    with WireClient(one.url, "r", rank=1, world_size=2) as client:
        client.hello()
        assert client.send(layer_schema(*LAYERS), detail(rows), detail({6: table(6.0, 1.0)})).rejected == ()
    eventually(lambda: len(one.get("/runs/r/ring")["ranks"]) == 1, 20)
    one.kill()
    one.restart()
    (rank,) = one.get("/runs/r/ring")["ranks"]
    (part,) = rank["parts"]
    assert (rank["rank"], rank["attempt"], rank["first_step"], rank["last_step"]) == (1, 1, 3, 6)
    assert part == {
        "trigger_step": 5, "reason": "a gradient is not finite", "first_step": 3, "last_step": 6, "num_steps": 4,
    }  # fmt: skip
    found = one.get("/runs/r/ring/layers", rank=1)
    assert (found["layers"], found["steps"], found["bucket_width"]) == (["a", "b"], [3, 4, 5, 6], 1)
    assert found["values"] == [[3.0, 4.0, 5.0, 6.0], [6.0, 8.0, None, 1.0]]
    assert found["nonfinite"] == [[1, 2, 1]]
    assert (found["first_step"], found["last_step"]) == (3, 6)
    part_of = one.get("/runs/r/ring/layers", rank=1, statistic="num_nonfinite", **{"from": 4, "to": 5})
    assert (part_of["steps"], part_of["values"]) == ([4, 5], [[0.0, 0.0], [0.0, 1.0]])
    assert one.get("/runs/r/ring/layers", rank=1, columns=2)["steps"] == [5, 6]
    missing = httpx.get(f"{one.url}/api/v1/runs/r/ring/layers", params={"rank": 0})
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    backwards = httpx.get(f"{one.url}/api/v1/runs/r/ring/layers", params={"rank": 1, "from": 9, "to": 2})
    assert backwards.status_code == 422


def test_what_is_no_ring_is_refused_by_name_and_counted(server: Callable[..., Server]) -> None:
    one = server()
    with WireClient(one.url, "r") as client:
        client.hello()
        good = table(1.0, 1.0)
        too_many = dict.fromkeys(range(wire.MAX_DETAIL_STEPS + 1), (0.0,) * WIDTH)
        ack = client.send(
            layer_schema(*LAYERS),
            scalar_schema("train/loss"),
            detail({1: good}, schema_id=9),
            detail({1: (1.0,)}, schema_id=1),
            detail({1: good[:-1]}),
            detail({-1: good}),
            detail(too_many),
            detail({}),
            detail({1: good}, trigger_step=-4),
            wire.encode(
                wire.Detail(
                    kind="ring", reason="x" * 501, schema_id=2, steps=(1,), times=(1.0,), values=bytes(112)
                )
            ),
        )
    codes = [rejection.code for rejection in ack.rejected]
    assert codes == [
        "unknown_schema", "unknown_schema", "frame_length", "step_out_of_range", "too_many_steps", "empty_frame",
        "step_out_of_range", "invalid_detail",
    ]  # fmt: skip
    assert "that schema declares no layers" in ack.rejected[1].message
    assert one.get("/runs/r/ring") == {"ranks": []}
    assert one.get("/runs/r")["rejected_records"] == len(codes)


def test_agents_that_understand_it_are_asked_when_a_grave_alert_opens(server: Callable[..., Server]) -> None:
    one = server()
    with (
        WireClient(one.url, "r", world_size=2) as asked,
        WireClient(one.url, "r", rank=1, world_size=2) as old,
    ):
        asked.send_raw(wire.encode(hello_of(asked, "ring")))
        assert isinstance(asked.receive(), wire.Welcome)
        old.hello()
        old.send(user_alert("warning", "not grave"))
        old.send(user_alert("error"))
        command = asked.receive(20)
        assert isinstance(command, wire.Command)
        assert (command.kind, command.step, command.rank) == ("ring", 5, 1)
        assert command.reason == "alert user (error)"
        with pytest.raises(TimeoutError):
            asked.receive(1)
        with pytest.raises(TimeoutError):
            old.receive(0)
    # Who comes back within a minute, or can only POST, is told as well.
    with WireClient(one.url, "r", world_size=2) as again:
        again.send_raw(wire.encode(hello_of(again, "ring")))
        answers = {type(message).__name__: message for message in (again.receive(), again.receive(5))}
        assert answers["Command"] == command
        for kinds, expected in ((("ring",), (command,)), ((), ()), (("other",), ())):
            body = wire.encode(wire.Batch(hello=hello_of(again, *kinds)))
            answer = httpx.post(f"{one.url}/api/v1/ingest", content=body)
            result = wire.decode_server_message(answer.content)
            assert isinstance(result, wire.BatchResult)
            assert result.commands == expected


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def test_the_server_asks_a_real_training_for_its_ring(
    server: Callable[..., Server], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = server()
    monkeypatch.setenv("GRADIOMETER_URL", one.url)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gm.init(run_id="asked") as run:
        run.watch(model, optimizer)
        for _ in range(30):
            run.log({"train/loss": step_of(model, optimizer)})
        run.alert("the evaluation looks wrong", severity="error")

        def shipped() -> bool:
            run.log({"train/loss": step_of(model, optimizer)})
            return bool(one.get("/runs/asked/ring")["ranks"])

        eventually(shipped, 30, what="the ring arrives after the server asked for it")
        assert run.dropped == {}
    eventually(lambda: one.get("/runs/asked")["state"] == "finished", 20)
    (rank,) = one.get("/runs/asked/ring")["ranks"]
    assert (rank["rank"], rank["first_step"]) == (0, 1)
    assert {part["reason"] for part in rank["parts"]} == {"alert user (error)"}
    ring = one.get("/runs/asked/ring/layers", rank=0)
    merged = one.get("/runs/asked/layers", statistic="norm", columns=4000)
    shared = [merged["steps"].index(step) for step in ring["steps"]]
    for mine, theirs in zip(ring["values"], merged["values"], strict=True):
        assert mine == pytest.approx([theirs[index] for index in shared], rel=1e-5)


@pytest.mark.slow
def test_R78_a_weight_that_becomes_inf_at_iteration_60_is_an_alert_within_two_logged_steps(
    server: Callable[..., Server], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = server()
    monkeypatch.setenv("GRADIOMETER_URL", one.url)
    torch.manual_seed(0)
    text = standard_library_text(150_000)
    model = LanguageModel(ModelConfig(width=32, blocks=2, context=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    with gm.init(run_id="char") as run:
        run.watch(model, optimizer)
        for iteration in range(1, 67):
            if iteration == 60:
                with torch.no_grad():
                    model.blocks[1].mlp.up.weight[3, 5] = math.inf
            inputs, targets = text.batch(size=4, context=32, generator=generator)
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"train/loss": loss})
    eventually(lambda: one.get("/runs/char")["state"] == "finished", 20)
    (alert,) = [found for found in one.get("/runs/char/alerts")["alerts"] if found["rule"] == "non_finite"]
    assert alert["severity"] == "critical"
    assert 60 <= alert["first_step"] < 62
    assert "blocks.1.mlp" in alert["layer"], alert
    (ring,) = one.get("/runs/char/ring")["ranks"]
    assert (ring["first_step"], ring["parts"][0]["trigger_step"]) == (1, 60)
    assert one.get("/runs/char/ring/layers", rank=0, to=59)["nonfinite"] == []
