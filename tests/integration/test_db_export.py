"""An exported run, read with the standard library alone: complete, to the last bit, on both engines."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import update

from gradiometer import wire
from gradiometer_server import cli
from gradiometer_server.clock import SystemClock
from gradiometer_server.store import thinning
from gradiometer_server.store.database import Database, open_database
from gradiometer_server.store.tables import run
from tests.integration.stores import LOSS, flush, new_run, new_series, tail
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, layer_schema, scalar_schema

ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0]
HARD = [
    0.1,
    5e-324,
    1e-320,
    1.7976931348623157e308,
    -0.0,
    1 / 3,
    float("nan"),
    float("inf"),
    float("-inf"),
    2.0**53 + 2,
]
NAME = 'val/AR@100 "x",\n= 1'.replace("\n", " ")


def lines(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=_no_json) for line in path.read_text(encoding="utf-8").splitlines()
    ]


def _no_json(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def bits_of(written: float | str) -> int:
    """What README.md of an export says about numbers."""
    if isinstance(written, str) and written.startswith("NaN:"):
        return int(written[4:], 16)
    return int(struct.unpack("<Q", struct.pack("<d", float(written)))[0])


def exported(url: str, run_id: str, path: Path, *more: str) -> str:
    assert cli.main(["db", "export", run_id, str(path), "--database", url, "--quiet", *more]) == 0
    assert not path.with_name(path.name + ".partial").exists()
    text: str = json.loads((path / "manifest.json").read_text())["run"]
    assert text == run_id
    return text


def report(made: Server, run_id: str) -> None:
    with WireClient(made.url, run_id) as agent:
        agent.hello()
        partials = {step: [4.0, 2.0, 10.0, -1.0, 3.0, 1.0, 0.0] * 2 for step in range(1, 11)}
        values = {step: [value, float(step)] for step, value in enumerate(HARD, 1)}
        ring = wire.decode_record(frame({9: partials[9]}, schema_id=2))
        assert isinstance(ring, wire.Frame)
        detail = wire.Detail(
            kind="ring",
            reason="why",
            schema_id=2,
            steps=(9,),
            times=(9.0,),
            values=ring.values,
            trigger_step=10,
        )
        agent.send(
            scalar_schema("loss", NAME), layer_schema(("a", 4), ("b", 4)), frame(values), frame(partials, schema_id=2),
            wire.encode(detail),
            wire.encode(wire.Event(kind="dump", time=1.0, step=9, attributes={"path": "/p", "reason": "r"})),
            exit_event(0),
        )  # fmt: skip
    eventually(lambda: made.get(f"/runs/{run_id}")["state"] == "finished", 20)


def test_everything_of_a_run_beside_a_running_server(
    server: Callable[..., Server], database_url: str, tmp_path: Path
) -> None:
    made = server(database_url)
    report(made, "r")
    report(made, "other")
    eventually(lambda: made.get("/runs/r")["sources"][0]["folded_seq"] == 7, 30)
    exported(database_url, "r", tmp_path / "out")
    out = tmp_path / "out"
    points = {
        (line["metric"], line["rank"]): line
        for line in lines(out / "points.jsonl")
        if line["kind"] == "scalar"
    }
    loss = points["loss", None]
    assert loss["steps"] == list(range(1, len(HARD) + 1))
    assert [bits_of(value) for value in loss["values"]] == [bits_of(value) for value in HARD]
    assert points[NAME, None]["values"] == [float(step) for step in range(1, 11)]
    assert points["_time", None]["steps"] == loss["steps"]
    norm = next(line for line in lines(out / "points.jsonl") if line["metric"] == "layer/norm")
    assert np.asarray(norm["values"]) == pytest.approx(np.sqrt(10.0) * np.ones((10, 2)))
    described = json.loads((out / "run.json").read_text())
    assert [layout["names"] for layout in described["layouts"]] == [["a", "b"]]
    assert (described["id"], described["state"], len(described["sources"])) == ("r", "finished", 1)
    assert lines(out / "alerts.jsonl")
    assert lines(out / "dumps.jsonl")[0]["step"] == 9
    (detail,) = lines(out / "details.jsonl")
    assert (detail["layers"], detail["columns"]) == (["a", "b"], list(wire.STATISTICS))
    assert detail["values"] == [[[4.0, 2.0, 10.0, -1.0, 3.0, 1.0, 0.0]] * 2]
    counts = json.loads((out / "manifest.json").read_text())["counts"]
    assert counts["points"] == sum(len(line["steps"]) for line in lines(out / "points.jsonl"))
    assert not (out / "unfolded.jsonl").exists()


def test_csv_holds_the_same_values(server: Callable[..., Server], tmp_path: Path) -> None:
    made = server()
    report(made, "r")
    eventually(lambda: made.get("/runs/r")["sources"][0]["folded_seq"] == 7, 30)
    exported(made.database_url, "r", tmp_path / "out", "--format", "csv")
    with (tmp_path / "out" / "points.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    loss = [row for row in rows if row["metric"] == "loss" and not row["rank"]]
    assert [bits_of(row["value"]) for row in loss] == [bits_of(value) for value in HARD]
    assert [row["layer"] for row in rows if row["metric"] == "layer/norm"] == ["a"] * 10 + ["b"] * 10
    assert {row["metric"] for row in rows} >= {NAME, "_time"}


def test_what_is_not_folded_yet_is_there_as_it_was_sent(database_url: str, tmp_path: Path) -> None:
    database = open_database(database_url, clock=SystemClock())
    key = new_run(database)
    with database.write() as conn:
        from gradiometer_server.store.tables import frame as frames
        from gradiometer_server.store.tables import source_schema

        place = {"run_id": key, "source_id": 1}
        schema, data = scalar_schema("loss"), frame({1: [ODD_NAN], 2: [3.5]})
        conn.execute(source_schema.insert(), {**place, "seq": 1, "data": schema})
        conn.execute(
            frames.insert(), [{**place, "seq": 1, "data": schema}, {**place, "seq": 2, "data": data}]
        )
    database.close()
    exported(database_url, "r", tmp_path / "out")
    declared, sent = lines(tmp_path / "out" / "unfolded.jsonl")
    assert (declared["type"], declared["columns"]) == ("schema", ["loss"])
    assert (sent["columns"], sent["steps"], sent["values"]) == (
        ["loss"],
        [1, 2],
        [["NaN:7ff8000000000123"], [3.5]],
    )


def test_14000_points_are_14000_rows_and_thinned_ones_their_windows(
    database_url: str, tmp_path: Path
) -> None:
    database = open_database(database_url, clock=SystemClock())
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    values = np.random.default_rng(5).standard_normal(14_000)
    values[777] = ODD_NAN
    flush(database, key, (one, tail(np.arange(14_000), values)))
    exported(database_url, "r", tmp_path / "raw", "--format", "csv")
    with (tmp_path / "raw" / "points.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(14_000))
    assert [bits_of(row["value"]) for row in rows] == values.view(np.uint64).tolist()
    with database.write() as conn:
        conn.execute(update(run).values(outcome="finished"))
    thinning.thin_batch(database, key, (-1, -1), 1e9)
    database.close()
    exported(database_url, "r", tmp_path / "thin")
    windows = lines(tmp_path / "thin" / "windows.jsonl")
    assert not (tmp_path / "thin" / "points.jsonl").exists()
    assert sum(sum(line["num_finite"]) + sum(line["num_nan"]) for line in windows) == 14_000
    assert max(max(line["max"]) for line in windows) == np.nanmax(values)
    exported(database_url, "r", tmp_path / "thin-csv", "--format", "csv")
    with (tmp_path / "thin-csv" / "windows.csv").open(newline="", encoding="utf-8") as file:
        assert sum(int(row["num_nan"]) for row in csv.DictReader(file)) == 1


def test_what_cannot_be_exported_leaves_nothing_behind(
    sqlite_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = open_database(sqlite_url, clock=SystemClock())
    key = new_run(database)
    (one,) = new_series(database, key, 1, LOSS)
    flush(database, key, (one, tail(np.arange(10), np.ones(10))))
    assert cli.main(["db", "export", "none", str(tmp_path / "out"), "--database", sqlite_url]) == 2
    assert "no run named 'none'" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert cli.main(["db", "export", "r", str(tmp_path / "there"), "--database", sqlite_url]) == 2
    assert "exists" in capsys.readouterr().err
    damage(database)
    assert cli.main(["db", "export", "r", str(tmp_path / "out"), "--database", sqlite_url]) == 2
    assert "damaged" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"there"}
    database.close()


def damage(database: Database) -> None:
    from gradiometer_server.store.tables import chunk

    with database.write() as conn:
        conn.execute(update(chunk).values(data=b"\x01\x01no longer what it was"))
