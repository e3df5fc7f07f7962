"""What a client can ask of series: many runs and metrics, other x axes, ranks, groups, smoothing, export, following, Arrow."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.compute
import pyarrow.ipc
import pytest

from gradiometer_server.api import schemas, series_schemas
from tests.support.eventually import eventually
from tests.support.postgres import PostgresCluster
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, layer_schema, scalar_schema

ARROW = "application/vnd.apache.arrow.stream"
BEGAN_S = 1_800_000_000.0
STEPS = 400


def loss_of(run: int, step: int) -> float:
    special = {50: math.nan, 60: math.inf, 70: -math.inf, 123: 1e6}
    return special.get(step, run + step / 1000) if run == 0 else run + step / 1000


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    cluster: PostgresCluster | None = None
    url = f"sqlite:///{folder / 'a.db'}"
    if request.param == "postgresql":
        cluster = request.getfixturevalue("postgres_cluster")
        url = cluster.create_database()
    made = Server(url, folder, arguments=[], environment={})
    try:
        made.start()
        fill(made)
        yield made
    finally:
        made.close()
        if cluster is not None:
            cluster.drop_database(url)


def fill(made: Server) -> None:
    for run in range(3):
        with WireClient(made.url, f"run {run}", project="charts") as client:
            client.hello()
            client.send(scalar_schema("train/loss", "train/tokens"), layer_schema(("a", 4), ("b", 4)))
            rows = {step: (loss_of(run, step), 4096.0 * step) for step in range(1, STEPS + 1)}
            client.send(frame(rows))
            client.send(
                scalar_schema("val/loss", schema_id=3),
                frame(dict.fromkeys(range(100, 401, 100), (1.0,)), schema_id=3),
            )
            client.send(exit_event(0))
    ranks = [WireClient(made.url, "ranks", project="charts", rank=rank, world_size=2) for rank in range(2)]
    for client in ranks:
        client.hello()
        client.send(scalar_schema("time/step_s"))
    for rank, client in enumerate(ranks):
        client.send(
            frame({step: (rank + (9.0 if (rank, step) == (1, 7) else 0.0),) for step in range(1, 41)})
        )
        client.send(exit_event(0))
        client.close()
    eventually(lambda: all(run["last_step"] in (40, STEPS) for run in made.get("/runs")["runs"]), 20)
    eventually(lambda: all(run["state"] == "finished" for run in made.get("/runs")["runs"]), 20)


def query(made: Server, **body: Any) -> list[dict[str, Any]]:
    answer = made.post("/series/query", body)
    series_schemas.SeriesAnswers.model_validate(answer)
    found: list[dict[str, Any]] = answer["series"]
    return found


def test_many_runs_and_metrics_in_one_request(one: Server) -> None:
    found = query(one, runs=["run 0", "run 1", "no such"], metrics=["train/loss", "train/tokens"], buckets=50)
    assert [(line["run"], line["metric"]) for line in found] == [
        (run, metric) for metric in ("train/loss", "train/tokens") for run in ("run 0", "run 1", "no such")
    ]
    assert [bool(line.get("error")) for line in found] == [False, False, True] * 2
    assert found[0]["points"]["max"][123 // found[0]["bucket_width"]] == 1e6
    assert [sum(found[0]["points"][kind]) for kind in ("nan", "pos_inf", "neg_inf")] == [1, 1, 1]


def test_few_points_far_apart_come_as_they_are(one: Server) -> None:
    (line,) = query(one, series=[{"run": "run 0", "metric": "val/loss"}], buckets=4)
    assert (line["bucket_width"], line["points"]["step"]) == (1, [100, 200, 300, 400])
    (line,) = query(one, series=[{"run": "run 0", "metric": "val/loss"}], buckets=2)
    assert line["bucket_width"] == 256


def test_wall_time_relative_time_and_tokens_as_x(one: Server) -> None:
    ref = [{"run": "run 0", "metric": "train/loss"}]
    (line,) = query(one, series=ref, x="time", buckets=1000)
    assert line["bucket_width"] == 0
    assert line["points"]["x"] == [BEGAN_S + step for step in range(1, STEPS + 1)]
    assert (line["first_x"], line["last_x"]) == (BEGAN_S + 1, BEGAN_S + STEPS)
    (line,) = query(one, series=ref, x="metric", x_metric="train/tokens", buckets=100)
    width = line["bucket_width"]
    assert math.frexp(width)[0] == 0.5
    assert len(line["points"]["x"]) <= 100
    at = line["points"]["max"].index(1e6)
    assert line["points"]["x"][at] // width == 4096 * 123 // width
    (line,) = query(
        one,
        series=ref,
        x="metric",
        x_metric="train/tokens",
        buckets=1000,
        **{"from": 4096 * 10, "to": 4096 * 12.5},
    )
    assert line["points"]["step"] == [10, 11, 12]
    (started_s,) = {source["started_s"] for source in one.get("/runs/run%200")["sources"]}
    (line,) = query(one, series=ref, x="relative_time", buckets=1000)
    assert line["points"]["x"][0] == BEGAN_S + 1 - started_s
    (line,) = query(one, series=ref, x="metric", x_metric="nothing")
    assert "x axis" in line["error"]


def test_each_rank_and_a_band_over_all(one: Server) -> None:
    ref = [{"run": "ranks", "metric": "time/step_s"}]
    merged, *none = query(one, series=ref)
    assert not none
    assert merged["points"]["mean"][0] == 0.5
    each = query(one, series=ref, ranks="each")
    assert [(line["rank"], line["points"]["mean"][0]) for line in each] == [(0, 0.0), (1, 1.0)]
    (band,) = query(one, series=ref, ranks="band", buckets=10)
    assert band["members"] == [{"run": "ranks", "rank": 0}, {"run": "ranks", "rank": 1}]
    points = band["points"]
    at = points["max"].index(10.0)
    assert (points["max_member"][at], points["min_member"][at], points["members"][at]) == (1, 0, 2)
    assert points["min"] == [0.0] * len(points["step"])
    assert sum(points["count"]) == 80


def test_a_group_of_runs_is_one_line(one: Server) -> None:
    names = ["run 0", "run 1", "run 2"]
    (line,) = query(one, runs=names, metrics=["train/loss"], group="seeds", buckets=1000)
    assert (line["run"], line["group"], line["bucket_width"]) == (None, "seeds", 1)
    assert [member["run"] for member in line["members"]] == names
    points = line["points"]
    assert (points["min"][0], points["max"][0]) == (0.001, 2.001)
    assert math.isclose(points["mean"][0], 1.001)
    assert (points["max"][122], points["max_member"][122]) == (1e6, 0)
    assert (points["members"][49], points["nan"][49], points["count"][49]) == (3, 1, 2)
    two = [
        {"run": run, "metric": "train/loss", "group": group} for run, group in zip(names, "aab", strict=True)
    ]
    lines = query(one, series=two, x="relative_time", buckets=20)
    assert [(line["group"], len(line["members"])) for line in lines] == [("a", 2), ("b", 1)]


def test_who_is_missing_from_a_group_is_named(one: Server) -> None:
    (line,) = query(one, runs=["run 0", "nobody", "run 1", "ranks"], metrics=["val/loss"], group="g")
    assert [member["run"] for member in line["members"]] == ["run 0", "run 1"]
    assert line["missing"] == [{"run": "nobody", "rank": None}, {"run": "ranks", "rank": None}]
    assert "error" not in line
    (line,) = query(one, runs=["run 0", "run 1"], metrics=["val/loss"], group="g")
    assert "missing" not in line


def test_smoothing_skips_what_is_not_finite(one: Server) -> None:
    (line,) = query(one, series=[{"run": "run 1", "metric": "train/loss"}], smoothing=0.9)
    last, expected = 0.0, []
    for number, step in enumerate(range(1, STEPS + 1), start=1):
        last = 0.9 * last + 0.1 * loss_of(1, step)
        expected.append(last / (1 - 0.9**number))
    assert line["points"]["smoothed"] == pytest.approx(expected, rel=1e-9)
    (line,) = query(one, series=[{"run": "run 0", "metric": "train/loss"}], smoothing=0.9)
    assert [
        step for step, x in zip(line["points"]["step"], line["points"]["smoothed"], strict=True) if x is None
    ] == [50, 60, 70]


def test_r46_export_holds_every_point(one: Server) -> None:
    with WireClient(one.url, "fourteen", project="charts") as client:
        client.hello()
        client.send(scalar_schema("train/loss"))
        for begin in range(1, 14_001, 1000):
            client.send(frame({step: (1.0 / step,) for step in range(begin, begin + 1000)}))
    path = "/api/v1/runs/fourteen/points?metric=train/loss"
    eventually(lambda: httpx.get(one.url + path + "&limit=1").json()["total"] == 14_000, 20)
    rows = list(csv.DictReader(io.StringIO(httpx.get(f"{one.url}{path}&format=csv").text)))
    assert [(int(row["step"]), float(row["value"])) for row in rows] == [
        (s, 1.0 / s) for s in range(1, 14_001)
    ]
    assert {float(row["time_s"]) - int(row["step"]) for row in rows} == {BEGAN_S}
    steps, cursor = [], ""
    while cursor is not None:
        more = f"&cursor={cursor}" if cursor else ""
        page = httpx.get(f"{one.url}{path}&limit=3000{more}").json()
        series_schemas.PointsPage.model_validate(page)
        assert page["total"] == 14_000
        steps += page["points"]["step"]
        cursor = page["next_cursor"]
    assert steps == list(range(1, 14_001))
    answer = httpx.get(one.url + path, headers={"Accept": ARROW})
    assert answer.headers["x-total-count"] == "14000"
    table = pyarrow.ipc.open_stream(answer.content).read_all()
    assert table["value"].to_pylist() == [1.0 / s for s in range(1, 14_001)]
    bounded = httpx.get(f"{one.url}{path}&format=csv&from=10&to=12").text
    assert bounded.splitlines()[1:] == [f"{s},{1.0 / s!r},{BEGAN_S + s}" for s in (10, 11, 12)]


def test_values_that_are_not_finite_in_csv_json_and_arrow(one: Server) -> None:
    path = f"{one.url}/api/v1/runs/run%200/points?metric=train/loss&from=50&to=70"

    def refuse(word: str) -> float:
        raise AssertionError(word)

    page = json.loads(httpx.get(path).text, parse_constant=refuse)
    values = dict(zip(page["points"]["step"], page["points"]["value"], strict=True))
    assert (values[50], values[60], values[70], values[51]) == ("NaN", "Infinity", "-Infinity", 0.051)
    text = httpx.get(f"{path}&format=csv").text.splitlines()
    assert [line.split(",")[1] for line in (text[1], text[11], text[21])] == ["NaN", "Infinity", "-Infinity"]
    table = pyarrow.ipc.open_stream(httpx.get(f"{path}&format=arrow").content).read_all()
    assert table["value"].null_count == 0
    assert math.isnan(table["value"][0].as_py())
    assert table["value"][20].as_py() == -math.inf


def test_arrow_says_what_json_says(one: Server) -> None:
    series = [
        {"run": "run 0", "metric": "train/loss"},
        {"run": "no such", "metric": "x"},
        {"run": "run 1", "metric": "train/loss"},
    ]
    for more in ({}, {"x": "time", "smoothing": 0.5}, {"ranks": "band"}):
        body = {"series": series, "buckets": 40, **more}
        plain = query(one, **body)
        answer = httpx.post(f"{one.url}/api/v1/series/query", json=body, headers={"Accept": ARROW})
        assert answer.headers["content-type"] == ARROW
        table = pyarrow.ipc.open_stream(answer.content).read_all()
        heads = json.loads(table.schema.metadata[b"gradiometer"])["series"]
        for number, line in enumerate(plain):
            assert heads[number] == {name: value for name, value in line.items() if name != "points"}
            mine = table.filter(pyarrow.compute.equal(table["series"], number))
            for name, column in line["points"].items():
                if column or name in mine.column_names:
                    assert mine[name].to_pylist() == column, (more, name)


def test_layers_reduced_otherwise_and_as_arrow(one: Server) -> None:
    with WireClient(one.url, "layers", project="charts") as client:
        client.hello()
        client.send(layer_schema(("a", 4), ("b", 4)))
        # count, sum, sum of squares, min, max, zeros, not finite
        rows = {step: (4.0, 0.0, float(step), -1.0, 1.0, 0.0, 0.0) * 2 for step in range(1, 65)}
        client.send(frame(rows, schema_id=2))
    path = f"{one.url}/api/v1/runs/layers/layers?columns=8&statistic=norm"
    eventually(lambda: httpx.get(path).json()["last_step"] == 64, 20)
    found = {how: httpx.get(f"{path}&reduce={how}").json() for how in ("max", "min", "mean")}
    for answer in found.values():
        schemas.LayerMap.model_validate(answer)
    lows, means, highs = (found[how]["values"][0] for how in ("min", "mean", "max"))
    assert all(low <= mean <= high for low, mean, high in zip(lows, means, highs, strict=True))
    assert lows[1] < means[1] < highs[1]
    table = pyarrow.ipc.open_stream(httpx.get(path, headers={"Accept": ARROW}).content).read_all()
    about = json.loads(table.schema.metadata[b"gradiometer"])
    assert about["layers"] == ["a", "b"]
    assert table["step"].to_pylist() == found["max"]["steps"]
    assert [row[0] for row in table["value"].to_pylist()] == highs


def test_following_a_run(one: Server) -> None:
    def tail(cursor: str | None, **more: Any) -> dict[str, Any]:
        ref = {"run": "followed", "metric": "train/loss", **({"cursor": cursor} if cursor else {})}
        answer = one.post("/series/tail", {"series": [ref], **more})
        series_schemas.TailAnswers.model_validate(answer)
        found: dict[str, Any] = answer["series"][0]
        return found

    assert "no run" in tail(None)["error"]
    with WireClient(one.url, "followed", project="charts") as client:
        client.hello()
        client.send(scalar_schema("train/loss"))
        client.send(frame({step: (float(step),) for step in range(1, 11)}))
        eventually(lambda: len(tail(None)["points"]["step"]) == 10, 20)
        news = tail(None, limit=3)
        assert (news["points"]["step"], news["more"], news["reset"]) == ([8, 9, 10], False, False)
        assert tail(news["cursor"])["points"]["step"] == []
        client.send(frame({step: (float(step),) for step in range(11, 21)}))
        eventually(lambda: len(tail(news["cursor"])["points"]["step"]) == 10, 20)
        part = tail(news["cursor"], limit=4)
        assert (part["points"]["step"], part["more"]) == ([11, 12, 13, 14], True)
        assert tail(part["cursor"])["points"]["step"] == [15, 16, 17, 18, 19, 20]
    later = BEGAN_S * 1000 + 5
    with WireClient(one.url, "followed", project="charts", attempt=int(later)) as client:
        client.hello()
        client.send(scalar_schema("train/loss"))
        client.send(frame(dict.fromkeys(range(15, 18), (-1.0,))))
        eventually(lambda: tail(part["cursor"])["points"]["value"] == [-1.0] * 3, 20)
        taken_over = tail(news["cursor"].replace(".10.", ".20.").replace(".10", ".20"))
    assert taken_over["reset"]
    assert taken_over["points"]["step"] == list(range(1, 18))
    assert "cursor" in tail("nonsense")["error"]


def test_latest_values_of_all_runs(one: Server) -> None:
    answer = one.get("/latest", metrics=["train/loss", "val/loss"], project="charts", search="run ")
    series_schemas.LatestList.model_validate(answer)
    found = {run["id"]: run for run in answer["runs"]}
    assert found["run 1"]["values"] == {"train/loss": 1.4, "val/loss": 1.0}
    assert found["run 1"]["last_step"] == STEPS
    page = one.get("/runs", metrics="val/loss", search="run ")
    assert {run["id"]: run["latest"] for run in page["runs"]} == {
        f"run {n}": {"val/loss": 1.0} for n in range(3)
    }
    assert {run["latest"].get("train/loss") for run in one.get("/runs", search="run 1")["runs"]} == {1.4}


BAD = [
    ({"series": [{"run": "a", "metric": "b"}], "x": "metric"}, "body.x_metric"),
    ({"series": [{"run": "a", "metric": "b"}], "from": 1.5}, "body.from"),
    ({"series": [{"run": "a", "metric": "b"}], "x": "time", "buckets": 3}, "body.buckets"),
    ({"series": [{"run": "a", "metric": "b"}], "smoothing": 1.0}, "body.smoothing"),
    ({"series": [{"run": "a", "metric": "b"}] * 500, "buckets": 5000}, "body.series"),
    ({"runs": ["a"]}, "body.runs"),
    ({}, "body.series"),
    *(
        ({"series": [{"run": "a", "metric": "b"}], "x": axis, field: sign * 10**400, **more}, f"body.{field}")
        for axis, more in (("step", {}), ("time", {}), ("relative_time", {}), ("metric", {"x_metric": "c"}))
        for field in ("from", "to")
        for sign in (1, -1)
    ),
]


@pytest.mark.parametrize(("body", "field"), BAD, ids=[field for _, field in BAD])
def test_a_request_that_makes_no_sense_names_the_field(one: Server, body: Any, field: str) -> None:
    answer = httpx.post(f"{one.url}/api/v1/series/query", json=body)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_without_pyarrow_the_server_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "pyarrow.py").write_text("raise ImportError('hidden')\n")
    made = Server(
        f"sqlite:///{tmp_path / 'a.db'}",
        tmp_path,
        arguments=[],
        environment={"PYTHONPATH": str(tmp_path / "hidden")},
    )
    try:
        made.start()
        answer = httpx.get(f"{made.url}/api/v1/runs/a/layers", headers={"Accept": ARROW})
    finally:
        made.close()
    assert (answer.status_code, answer.json()["code"]) == (406, "not_acceptable")
    assert "gradiometer[arrow]" in answer.json()["remedy"]
