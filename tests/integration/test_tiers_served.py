"""Two ranks that measure more or less of a step, all the way to REST, on both engines: absent is shown as absent."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from gradiometer import wire
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event

STEPS, EVERY, BROKEN = 60, 20, 50
LAYERS = ("embed", "head")
FULL = {"count": 4, "sum": -1, "sum_squares": 25, "min": -4, "max": 3, "num_zeros": 2, "num_nonfinite": 0}
MEASURED = (1, 21, 41)
"""Steps that both ranks read in full; step 50 is broken on rank 1, which reads it in full alone."""


def declared(rank: int, schema_id: int, statistics: tuple[str, ...]) -> bytes:
    layers = tuple(wire.Layer(name=name, shape=(8,), numel=8, shard=(rank,), num_shards=2) for name in LAYERS)
    return wire.encode(wire.LayerSchema(schema_id=schema_id, layers=layers, statistics=statistics))


def frame(schema_id: int, step: int, statistics: tuple[str, ...], **changed: float) -> bytes:
    row = [float({**FULL, **changed}[name]) for name in statistics]
    values = struct.pack(f"<{2 * len(row)}d", *row, *row)
    return wire.encode(wire.Frame(schema_id=schema_id, steps=(step,), times=(1.8e9 + step,), values=values))


def said(rank: int) -> list[bytes]:
    records = [declared(rank, 1, wire.STATISTICS), declared(rank, 2, wire.NORM_STATISTICS)]
    for step in range(1, STEPS + 1):
        broken = step == BROKEN and rank == 1
        changed = {"sum_squares": math.nan, "num_nonfinite": 1, "min": math.nan} if broken else {}
        if step % EVERY == 1 or broken:
            records.append(frame(1, step, wire.STATISTICS, **changed))
        else:
            records.append(frame(2, step, wire.NORM_STATISTICS, **changed))
    facts = {"gradient statistics": f"norms in every step, all every {EVERY} steps (told by rank {rank})"}
    told = wire.Event(kind="environment", time=1.8e9, attributes={"facts": facts})
    return [*records, wire.encode(told), exit_event(0)]


@pytest.fixture
def run(server: Callable[..., Server], database_url: str) -> Callable[..., Any]:
    made = server(database_url)
    with ExitStack() as stack:
        agents = [
            stack.enter_context(WireClient(made.url, "r", rank=rank, world_size=2)) for rank in range(2)
        ]
        for agent in agents:
            agent.hello()
        for rank, agent in enumerate(agents):
            agent.send(*said(rank))

    def ask(path: str = "", **parameters: object) -> Any:
        return made.get(f"/runs/r{path}", **parameters)

    eventually(lambda: ask()["state"] == "finished" and ask()["last_step"] == STEPS, 20)
    return ask


def test_two_ranks_at_cadence_are_served_as_what_was_measured(run: Callable[..., Any]) -> None:
    metrics = {one["name"]: one for one in run("/metrics")["metrics"]}
    counts = {name: one["num_points"] for name, one in metrics.items()}
    every_step = ["grad/norm", "grad/num_nonfinite", "layer/norm", "layer/rms", "layer/num_nonfinite"]
    assert {name: counts[name] for name in every_step} == dict.fromkeys(every_step, STEPS)
    assert counts["grad/abs_max"] == counts["grad/zero_fraction"] == len(MEASURED)

    zeros = run("/layers", statistic="zero_fraction", columns=1000)
    shown = {
        step: values
        for step, *values in zip(zeros["steps"], *zeros["values"], strict=True)
        if values != [None, None]
    }
    assert shown == {step: [0.5, 0.5] for step in MEASURED}, "no zero and no NaN where nothing was measured"
    assert zeros["nonfinite"] == []
    norms = run("/layers", statistic="norm", columns=1000)
    assert norms["steps"] == list(range(1, STEPS + 1))
    assert norms["nonfinite"] == [[0, BROKEN - 1, 1], [1, BROKEN - 1, 1]]
    whole = run("/layers", statistic="zero_fraction", columns=1)
    assert whole["values"] == [[0.5], [0.5]], "a bucket is drawn if any step in it has a value"


def test_the_last_measured_is_shown_and_a_broken_step_names_its_rank(run: Callable[..., Any]) -> None:
    for step, measured in ((1, 1), (20, 1), (21, 21), (55, 41), (None, 41)):
        flow = run("/layers/flow", **({} if step is None else {"step": step}))
        at = STEPS if step is None else step
        assert flow["step"] == at
        assert flow["measured_at"] == {
            **dict.fromkeys(("norm", "rms", "num_nonfinite"), at),
            **dict.fromkeys(("mean", "std", "abs_max", "zero_fraction"), measured),
        }
        assert flow["statistics"]["zero_fraction"] == [0.5, 0.5]
        assert flow["statistics"]["norm"] == pytest.approx([math.sqrt(50)] * 2)
    flow = run("/layers/flow", step=BROKEN)
    assert flow["statistics"]["norm"] == ["NaN", "NaN"]
    assert flow["measured_at"]["abs_max"] == 41, "the other rank has read norms alone"

    (alert,) = run("/alerts")["alerts"]
    assert (alert["rule"], alert["first_step"], alert["ranks"]) == ("non_finite", BROKEN, [1])
    told = {source["rank"]: source["environment"]["gradient statistics"] for source in run()["sources"]}
    expected = "norms in every step, all every 20 steps (told by rank {})"
    assert told == {rank: expected.format(rank) for rank in range(2)}
