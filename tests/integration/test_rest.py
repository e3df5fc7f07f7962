"""REST over a real server, on both engines, about runs that real connections reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from gradiometer_server.api import schemas, series_schemas
from gradiometer_server.domain.folded import LAYER_STATISTICS
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, layer_schema, scalar_schema

RUN = "team/lauf 1 ✓?#%2F"
STRANGE = "train/Größe 🧨 \"x\" 'y' a/b?c#d"
STEPS = 300
PARTIALS = [4.0, 2.0, 10.0, -1.0, 3.0, 1.0, 0.0]
ABSENT_PARTIALS = [0.0] * 7
BAD_PARTIALS = [4.0, math.nan, math.nan, math.nan, math.nan, 0.0, 2.0]


@pytest.fixture
def one(server: Callable[..., Server], database_url: str) -> Server:
    """A server that has folded one finished run of 300 steps and two layers."""
    made = server(database_url)
    with WireClient(made.url, RUN, project="p") as agent:
        agent.hello()
        values = {step: (_loss(step), 1.0 / step) for step in range(1, STEPS + 1)}
        layers = {step: [*PARTIALS, *(BAD_PARTIALS if step == 250 else ABSENT_PARTIALS)] for step in values}
        agent.send(
            scalar_schema("train/loss", STRANGE),
            layer_schema(("embed", 4), ("head", 4)),
            frame(values),
            frame(layers, schema_id=2),
            exit_event(0),
        )
    eventually(lambda: _folded(made), 20)
    return made


def _loss(step: int) -> float:
    return {100: math.nan, 101: math.inf, 102: -math.inf, 200: 1e6}.get(step, 2.0)


def _folded(made: Server) -> bool:
    run = made.get(f"/runs/{quote(RUN, safe='')}")
    return run["state"] == "finished" and run["last_step"] == STEPS and run["alerts"]["total"] > 0


def path(*parts: str) -> str:
    return "/runs/" + "/".join([quote(RUN, safe=""), *parts])


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    schemas_problem = {"status", "code", "title", "detail", "remedy", "field"}
    assert set(body) == schemas_problem
    assert (body["status"], body["code"]) == (status, code)
    return body


def query(made: Server, *metrics: str, **more: Any) -> list[dict[str, Any]]:
    series = [{"run": RUN, "metric": metric} for metric in metrics]
    answer = made.post("/series/query", {"series": series, **more})
    series_schemas.SeriesAnswers.model_validate(answer)
    found: list[dict[str, Any]] = answer["series"]
    return found


def test_runs_and_what_they_are(one: Server) -> None:
    page = one.get("/runs")
    schemas.RunList.model_validate(page)
    (run,) = page["runs"]
    assert (run["id"], run["project"], run["state"], run["last_step"]) == (RUN, "p", "finished", STEPS)
    assert run["latest"]["train/loss"] == 2.0
    assert "_time" not in run["latest"]
    assert run["exit"] == {"code": 0, "signal": None, "reason": "", "inferred": False, "exception": None}
    detail = one.get(path())
    schemas.RunDetail.model_validate(detail)
    assert detail["layouts"][0]["layers"] == ["embed", "head"]
    assert [source["rank"] for source in detail["sources"]] == [0]
    assert one.get("/runs", state="running")["runs"] == []
    assert len(one.get("/runs", search="LAUF 1", project="p")["runs"]) == 1


def test_metrics(one: Server) -> None:
    answer = one.get(path("metrics"))
    schemas.MetricList.model_validate(answer)
    found = {metric["name"]: metric for metric in answer["metrics"]}
    assert {"train/loss", STRANGE, "grad/norm", "layer/norm"} <= set(found)
    assert "_time" not in found
    loss = found["train/loss"]
    assert (loss["section"], loss["kind"], loss["num_points"], loss["num_nonfinite"]) == (
        "train",
        "scalar",
        STEPS,
        3,
    )
    assert (loss["first_step"], loss["last_step"], loss["min"], loss["max"]) == (1, STEPS, 2.0, 1e6)
    assert found["layer/norm"]["kind"] == "layer"


def test_raw_points_come_back_exactly_and_not_finite_ones_are_counted(one: Server) -> None:
    (loss, strange) = query(one, "train/loss", STRANGE, buckets=1000)
    assert loss["bucket_width"] == 1
    assert (loss["first_step"], loss["last_step"]) == (1, STEPS)
    points = loss["points"]
    assert points["step"] == list(range(1, STEPS + 1))
    assert points["mean"][99:102] == [None, None, None]
    assert [points[kind][99:102] for kind in ("nan", "pos_inf", "neg_inf")] == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]
    assert points["count"][98:103] == [1, 0, 0, 0, 1]
    assert strange["points"]["mean"] == [1.0 / step for step in range(1, STEPS + 1)]


def test_buckets_keep_the_spike_and_the_nan(one: Server) -> None:
    (loss,) = query(one, "train/loss", buckets=10)
    width, points = loss["bucket_width"], loss["points"]
    assert width == 32
    assert len(points["step"]) == 10
    assert points["max"][200 // width] == 1e6
    assert points["nan"][100 // width] == 1
    assert (
        sum(points["count"]) + sum(points["nan"]) + sum(points["pos_inf"]) + sum(points["neg_inf"]) == STEPS
    )
    (part,) = query(one, "train/loss", **{"from": 199, "to": 201, "buckets": 10})
    assert part["points"]["step"] == [199, 200, 201]
    assert (part["first_step"], part["last_step"]) == (1, STEPS)


def test_one_unknown_series_does_not_spoil_the_others(one: Server) -> None:
    refs = [
        {"run": RUN, "metric": "train/loss"},
        {"run": RUN, "metric": "no/such"},
        {"run": "no such run", "metric": "train/loss"},
        {"run": RUN, "metric": "train/loss", "rank": 7},
        {"run": RUN, "metric": "layer/norm"},
    ]
    good, *bad = one.post("/series/query", {"series": refs})["series"]
    assert "error" not in good
    assert [series["points"]["step"] for series in bad] == [[]] * 4
    for series, word in zip(bad, ["no/such", "no such run", "rank 7", "layer statistic"], strict=True):
        assert word in series["error"]


def test_the_heat_map_and_the_flow(one: Server) -> None:
    answer = one.get(path("layers"), statistic="norm", columns=1000)
    schemas.LayerMap.model_validate(answer)
    assert answer["layers"] == ["embed", "head"]
    assert answer["steps"] == list(range(1, STEPS + 1))
    assert answer["values"][0] == pytest.approx([math.sqrt(10.0)] * STEPS)
    assert set(answer["values"][1]) == {None}
    assert answer["nonfinite"] == [[1, 249, 1]]
    assert (answer["first_step"], answer["last_step"]) == (1, STEPS)
    coarse = one.get(path("layers"), statistic="norm", columns=10)
    assert coarse["nonfinite"] == [[1, 250 // coarse["bucket_width"], 1]]
    flow = one.get(path("layers", "flow"), step=250)
    schemas.LayerFlow.model_validate(flow)
    assert flow["step"] == 250
    assert set(flow["statistics"]) == set(LAYER_STATISTICS)
    assert flow["statistics"]["norm"][1] == "NaN"
    assert flow["statistics"]["num_nonfinite"][1] == 2.0
    assert one.get(path("layers", "flow"))["step"] == STEPS
    assert one.get(path("layers", "flow"), step=0) == {
        "step": None, "layers": [], "statistics": {}, "measured_at": {},
    }  # fmt: skip


def test_alerts(one: Server) -> None:
    answer = one.get(path("alerts"))
    schemas.AlertList.model_validate(answer)
    assert answer["alerts"]
    for alert in answer["alerts"]:
        assert alert["run"] == RUN
        for text in ("title", "explanation", "advice"):
            assert alert[text].strip()
        assert one.get(path("alerts", quote(alert["id"], safe=""))) == alert
    assert one.get("/alerts", run=RUN) == answer
    assert {alert["id"] for alert in one.get("/alerts")["alerts"]} == {
        alert["id"] for alert in answer["alerts"]
    }
    problem(httpx.get(f"{one.url}/api/v1{path('alerts', 'none')}"), 404, "not_found")


def test_an_unknown_run_is_a_problem_on_every_route(one: Server) -> None:
    for tail in ("", "/metrics", "/layers", "/layers/flow", "/alerts", "/alerts/x"):
        found = problem(httpx.get(f"{one.url}/api/v1/runs/a%2Fb{tail}"), 404, "not_found")
        assert "a/b" in found["detail"]
    problem(httpx.get(f"{one.url}/api/v1/alerts?run=none"), 404, "not_found")


BAD_QUERIES: list[tuple[str, Any, str]] = [
    ("no series", {"series": []}, "body.series"),
    ("too many series", {"series": [{"run": "a", "metric": "b"}] * 1001}, "body.series"),
    ("no buckets", {"series": [{"run": "a", "metric": "b"}], "buckets": 0}, "body.buckets"),
    ("too many buckets", {"series": [{"run": "a", "metric": "b"}], "buckets": 5001}, "body.buckets"),
    ("negative step", {"series": [{"run": "a", "metric": "b"}], "from": -1}, "body.from"),
    ("reversed", {"series": [{"run": "a", "metric": "b"}], "from": 9, "to": 3}, "body.from"),
    ("misspelt", {"serie": []}, "body.serie"),
    ("no metric", {"series": [{"run": "a"}]}, "body.series.0.metric"),
    ("no number", {"series": [{"run": "a", "metric": "b", "attempt": True}]}, "body.series.0.attempt"),
    ("no rank", {"series": [{"run": "a", "metric": "b", "rank": False}]}, "body.series.0.rank"),
    ("no step", {"series": [{"run": "a", "metric": "b"}], "from": True}, "body.from"),
]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("empty")
    made = Server(f"sqlite:///{folder / 'x.db'}", folder, arguments=[], environment={})
    try:
        yield made.start()
    finally:
        made.close()


@pytest.mark.parametrize(("what", "body", "field"), BAD_QUERIES, ids=[row[0] for row in BAD_QUERIES])
def test_a_bad_query_names_the_field(empty: Server, what: str, body: Any, field: str) -> None:
    answer = httpx.post(f"{empty.url}/api/v1/series/query", json=body)
    assert problem(answer, 422, "invalid_request")["field"] == field, what


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/runs?limit=0", "query.limit"),
        ("/runs?limit=many", "query.limit"),
        ("/runs?state=dead", "query.state"),
        ("/runs?cursor=x", "cursor"),
        ("/alerts?state=dead", "query.state"),
        ("/runs/x/layers?statistic=median", "query.statistic"),
        ("/runs/x/layers?columns=4001", "query.columns"),
        ("/runs/x/layers/flow?step=-1", "query.step"),
    ],
)
def test_a_bad_parameter_is_named(empty: Server, path: str, field: str) -> None:
    assert problem(httpx.get(f"{empty.url}/api/v1{path}"), 422, "invalid_request")["field"] == field


def test_every_error_has_the_same_shape(empty: Server) -> None:
    api = f"{empty.url}/api/v1"
    problem(httpx.get(f"{api}/nothing"), 404, "not_found")
    problem(httpx.get(f"{api}/series/query"), 405, "method_not_allowed")
    problem(httpx.delete(f"{api}/runs"), 405, "method_not_allowed")
    not_json = httpx.post(f"{api}/series/query", content=b"{", headers={"Content-Type": "application/json"})
    problem(not_json, 422, "invalid_request")
    huge = b'{"series": "' + b"x" * 1024 * 1024 + b'"}'
    problem(httpx.post(f"{api}/series/query", content=huge), 413, "body_too_large")

    def chunked() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * 100_000

    problem(httpx.post(f"{api}/series/query", content=chunked()), 413, "body_too_large")


def test_the_api_describes_itself(empty: Server) -> None:
    spec = httpx.get(f"{empty.url}/openapi.json").json()
    assert spec["openapi"].startswith("3.")
    wanted = {
        "/runs", "/runs/{run}", "/runs/{run}/metrics", "/series/query", "/runs/{run}/layers", "/runs/{run}/layers/flow",
        "/runs/{run}/ring", "/runs/{run}/ring/layers", "/runs/{run}/histograms", "/runs/{run}/histograms/layers",
        "/runs/{run}/commands", "/runs/{run}/summary", "/housekeeping", "/series/tail", "/runs/{run}/points", "/latest",
        "/alerts", "/runs/{run}/alerts", "/runs/{run}/alerts/{alert}", "/ingest",
    }  # fmt: skip
    assert set(spec["paths"]) == {"/api/v1" + route for route in wanted} | {"/healthz", "/readyz"}
    for route, methods in spec["paths"].items():
        for operation in methods.values():
            assert operation["description"], route
            if route != "/api/v1/ingest":
                good = operation["responses"]["202" if route.endswith("/commands") else "200"]
                assert "$ref" in good["content"]["application/json"]["schema"], route
    docs = httpx.get(f"{empty.url}/docs").text
    assert all(route.replace("{", "{") in docs for route in spec["paths"])
    assert "<script" not in docs
    assert "http://" not in docs
    assert "https://" not in docs
