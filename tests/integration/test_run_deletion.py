"""Deleting runs over REST: nothing of them is left in any table, and their agents are told, on both engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from sqlalchemy import func, select, text

import gradiometer as gm
from gradiometer import wire
from gradiometer.cli import main
from gradiometer.uplink.state import read_state
from gradiometer_server.store import maintenance
from gradiometer_server.store.database import Database
from gradiometer_server.store.tables import deleted_run, metadata
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, layer_schema, scalar_schema

DOOMED = "to go/ä"
PARTIALS = [4.0, 2.0, 10.0, -1.0, 3.0, 1.0, 0.0]


@pytest.fixture
def made(server: Callable[..., Server], database_url: str) -> Server:
    return server(database_url)


def report(agent: WireClient) -> None:
    """Something for every table: scalars, layers, an alert, a dump, details, a rule's state."""
    agent.hello()
    layers = {step: [*PARTIALS, *PARTIALS] for step in range(1, 400)}
    ring = msgspec.msgpack.decode(frame({398: layers[398]}, schema_id=2))
    detail = wire.Detail(
        kind="ring", reason="r", schema_id=2, steps=(398,), times=(1.0,), values=ring["values"]
    )
    agent.send(
        scalar_schema("loss"),
        layer_schema(("a", 4), ("b", 4)),
        frame({step: [1.0 if step != 300 else float("nan")] for step in layers}),
        frame(layers, schema_id=2),
        wire.encode(detail),
        wire.encode(wire.Event(kind="dump", time=1.0, step=398, attributes={"path": "/p", "reason": "r"})),
    )


def delete(made: Server, run: str, **params: Any) -> httpx.Response:
    return httpx.delete(f"{made.url}/api/v1/runs/{quote(run, safe='')}", params=params, timeout=60)


def rows_of_runs(database_url: str) -> dict[str, int]:
    database = Database(database_url)
    with database.read() as conn:
        counts = {
            name: conn.execute(select(func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }
    database.close()
    return counts


def purged(database_url: str) -> bool:
    database = Database(database_url)
    with database.read() as conn:
        found = conn.execute(select(deleted_run.c.is_purged)).scalars().all()
    database.close()
    return bool(found) and all(found)


def test_it_asks_for_confirmation(made: Server) -> None:
    with WireClient(made.url, DOOMED) as agent:
        agent.hello()
        agent.send(scalar_schema("loss"), frame({1: [1.0]}), exit_event(0))
    for params in ({}, {"confirm": ""}, {"confirm": "other"}, {"confirm": "true"}):
        problem = delete(made, DOOMED, **params).json()
        assert (problem["status"], problem["code"], problem["field"]) == (
            422,
            "invalid_request",
            "query.confirm",
        )
        assert DOOMED in problem["detail"]
    assert made.get(f"/runs/{quote(DOOMED, safe='')}")["id"] == DOOMED
    assert delete(made, "none", confirm="none").status_code == 404


def test_nothing_of_a_deleted_run_is_left_and_others_are_whole(made: Server) -> None:
    for run in (DOOMED, "stays"):
        with WireClient(made.url, run) as agent:
            report(agent)
            agent.send(exit_event(0))
    eventually(lambda: len(made.get("/runs", state="finished")["runs"]) == 2, 20)
    eventually(lambda: rows_of_runs(made.database_url)["frame"] == 0, 30)
    both = rows_of_runs(made.database_url)
    empty = {"deleted_run", "metric_definition"}
    assert all(count for name, count in both.items() if name not in {*empty, "frame"}), both
    answer = delete(made, DOOMED, confirm=DOOMED)
    assert (answer.status_code, answer.json()["id"]) == (200, DOOMED)
    assert [run["id"] for run in made.get("/runs")["runs"]] == ["stays"]
    assert httpx.get(f"{made.url}/api/v1/runs/{quote(DOOMED, safe='')}").status_code == 404
    assert {alert["run"] for alert in made.get("/alerts")["alerts"]} == {"stays"}
    eventually(lambda: purged(made.database_url), 30)
    after = rows_of_runs(made.database_url)
    assert after.pop("deleted_run") == 1
    assert after == {name: both[name] // 2 for name in after}
    assert made.get("/housekeeping")["runs_purged"] == 1
    assert delete(made, DOOMED, confirm=DOOMED).status_code == 404
    database = Database(made.database_url)
    assert list(maintenance.check(database)) == []
    database.close()


def test_a_running_run_is_deleted_by_force_alone_and_its_agents_are_told(made: Server) -> None:
    with WireClient(made.url, DOOMED) as agent:
        report(agent)
        problem = delete(made, DOOMED, confirm=DOOMED).json()
        assert (problem["status"], problem["code"]) == (409, "run_is_live")
        assert "force" in problem["remedy"]
        assert delete(made, DOOMED, confirm=DOOMED, force=True).status_code == 200
        agent.post(frame({400: [1.0]}))
        told = agent.receive()
        assert isinstance(told, wire.Problem)
        assert (told.code, told.fatal) == ("run_deleted", True)
        assert DOOMED in told.message
    eventually(lambda: purged(made.database_url), 30)
    with WireClient(made.url, DOOMED) as again:
        told = again.hello()
        assert isinstance(told, wire.Problem)
        assert (told.code, told.fatal) == ("run_deleted", True)
    body = wire.encode(
        wire.Batch(
            hello=wire.Hello(
                protocol=wire.PROTOCOL_VERSION, agent_version="t", run=again.run, sources=(again.source,)
            )
        )
    )
    posted = httpx.post(f"{made.url}/api/v1/ingest", content=body)
    assert posted.status_code == 400
    assert wire.decode_server_message(posted.content).code == "run_deleted"  # type: ignore[union-attr]
    counts = rows_of_runs(made.database_url)
    assert {name: count for name, count in counts.items() if count} == {"deleted_run": 1}


def test_an_agent_that_only_says_that_it_lives_is_told_too(made: Server) -> None:
    with WireClient(made.url, DOOMED) as agent:
        agent.hello()
        delete(made, DOOMED, confirm=DOOMED, force=True)
        alive = wire.SourceStatus(rank=0, attempt=agent.source.attempt, alive=True, spooled_seq=0)
        agent.send_raw(wire.encode(wire.Status(sources=(alive,))))
        told = agent.receive()
        assert isinstance(told, wire.Problem)
        assert told.code == "run_deleted"


def test_a_later_launch_begins_the_run_anew(made: Server) -> None:
    with WireClient(made.url, DOOMED) as old:
        report(old)
        # The clock of the trainer is ahead of the server's.
        assert (
            delete(made, DOOMED, confirm=DOOMED, force=True).json()["deleted_s"] < old.source.attempt / 1000
        )
        eventually(lambda: purged(made.database_url), 30)
        with WireClient(made.url, DOOMED, attempt=old.source.attempt + 1) as new:
            assert isinstance(new.hello(), wire.Welcome)
            new.send(scalar_schema("loss"), frame({1: [5.0]}))
            # The old launch is still connected, and its source has the same number as the new one's.
            old.post(frame({2: [6.0]}), first_seq=3)
            told = old.receive()
            assert isinstance(told, wire.Problem)
            assert told.code == "run_deleted"
            new.send(exit_event(0))
    eventually(lambda: made.get("/runs")["runs"][0]["state"] == "finished", 20)
    (run,) = made.get("/runs")["runs"]
    assert (run["attempts"], run["last_step"], run["latest"] or {"loss": 5.0}) == (1, 1, {"loss": 5.0})


def test_a_purge_that_was_cut_short_goes_on_at_the_next_start(made: Server) -> None:
    with WireClient(made.url, DOOMED) as agent:
        report(agent)
        agent.send(exit_event(0))
    eventually(lambda: rows_of_runs(made.database_url)["chunk"] > 0, 30)
    made.stop()
    database = Database(made.database_url)
    with database.write() as conn:
        run = conn.execute(text("SELECT run_id, public_id FROM run")).one()
        conn.execute(
            deleted_run.insert(),
            {
                "run_id": run.run_id,
                "public_id": run.public_id,
                "project": "p",
                "deleted_s": 1.0,
                "last_launch": 1,
                "is_purged": False,
            },
        )
        conn.execute(text("DELETE FROM source"))
        conn.execute(text("DELETE FROM run"))
    assert [problem.where for problem in maintenance.check(database)] == []
    database.close()
    made.start()
    eventually(lambda: purged(made.database_url), 30)
    counts = rows_of_runs(made.database_url)
    assert {name: count for name, count in counts.items() if count} == {"deleted_run": 1}


def test_a_real_training_goes_on_and_its_uplink_says_what_happened(
    server: Callable[..., Server],
    spool: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = server()
    monkeypatch.setenv("GRADIOMETER_URL", made.url)
    run = gm.init("p", "n")
    run.log({"loss": 1.0})
    eventually(lambda: made.get(f"/runs/{run.id}")["last_step"] is not None, 30)
    assert delete(made, run.id, confirm=run.id, force=True).status_code == 200
    assert run.directory is not None
    attempt = run.directory.parent

    def told() -> bool:
        run.log({"loss": 2.0})
        state = read_state(attempt)
        return state is not None and "was deleted" in state.last_error and state.state == "stopped"

    eventually(told, 30)
    run.finish(deadline_s=1.0)
    assert made.get("/runs")["runs"] == []
    assert main(["sync", str(spool), "--url", made.url]) == 1
    assert "was deleted" in capsys.readouterr().out
    assert made.get("/runs")["runs"] == []
