"""What reading costs: p50 and p99 of REST requests to a warm server, on SQLite or PostgreSQL.

    python benchmarks/query.py [--engine sqlite|postgresql] [--seconds 6] [--keep FOLDER] [--small] [--only NAME]

One client on one kept connection asks the same question again and again; the answer is read to its last byte, and its shape is
checked once. Prints a line per question and writes `benchmarks/results/query_<engine>_<date>.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import query_data as data
import record
from processes import Server, cpu_s

from gradiometer_server.clock import SystemClock
from gradiometer_server.store.database import open_database

WARMUP = 3
LEAST = 20
MOST = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request, what its answer must look like, and the goal (p50, p99 in ms)."""

    name: str
    path: str
    check: Callable[[Any], bool]
    body: dict[str, Any] | None = None
    goal_ms: tuple[int, int] | None = None
    accept: str = "application/json"


def questions(size: data.Size) -> list[Question]:
    """The lines of the result: those with a goal first."""
    steps = size.long_steps
    long = [{"run": data.LONG, "metric": data.LOSS}]
    many = [{"run": name, "metric": data.LOSS} for name in data.compared(size)]
    whole = {"series": long, "buckets": 2000}
    zoom = {"series": long, "buckets": 2000, "from": steps // 2, "to": steps // 2 + steps // 100}
    latest = urlencode({"metrics": data.LOSS, "limit": 1000, "search": "listed"})
    ten = urlencode([("metrics", f"group{n % 20}/metric_{n:04}") for n in range(2, 12)])
    return [
        Question(name="1,000,000 steps to 2,000 buckets", path="/series/query", body=whole, goal_ms=(15, 50), check=_has_points(900, steps)),
        Question(name="1 % zoom of it", path="/series/query", body=zoom, goal_ms=(10, 40), check=_has_points(900, steps // 100)),
        Question(name="100 runs x 10,000 steps x one metric, 1,000 buckets each", path="/series/query", body={"series": many, "buckets": 1000}, goal_ms=(150, 400), check=_has_points(500, size.compared_steps)),
        Question(name="148 layers x 1,000 columns out of 5,000 steps", path=f"/runs/{data.LAYERS}/layers?columns=1000", goal_ms=(100, 300), check=_has_columns(500)),
        Question(name="148 layers x 1,000 columns out of 200,000 steps", path=f"/runs/{data.MANY_LAYERS}/layers?columns=1000", goal_ms=(300, 800), check=_has_columns(500)),
        Question(name="latest of 1,000 runs", path=f"/latest?{latest}", goal_ms=(100, 300), check=_has_runs(size.listed_runs)),
        Question(name="list of 1,000 runs of 2,000 metric names", path="/runs?limit=1000&search=listed", goal_ms=(200, 500), check=_has_runs(size.listed_runs)),
        Question(name="latest of ten metrics of 1,000 runs", path=f"/latest?{ten}&limit=1000&search=listed", check=_has_runs(size.listed_runs)),
        Question(name="the same list with one metric", path=f"/runs?{urlencode({'limit': 1000, 'search': 'listed', 'metrics': data.LOSS})}", check=_has_runs(size.listed_runs)),
        Question(name="1,000,000 steps over time", path="/series/query", body={**whole, "x": "time"}, check=_has_points(900, steps)),
        Question(name="1,000,000 steps over tokens", path="/series/query", body={**whole, "x": "metric", "x_metric": data.TOKENS}, check=_has_points(900, steps)),
        Question(name="1,000,000 steps smoothed", path="/series/query", body={**whole, "smoothing": 0.99}, check=_has_points(900, steps)),
        Question(name="100 runs as one band", path="/series/query", body={"series": [{**ref, "group": "all"} for ref in many], "buckets": 1000}, check=_has_points(500, size.compared_steps)),
        Question(name="200 series x 5,000 buckets", path="/series/query", body={"series": long * 200, "buckets": 5000}, check=_has_points(3000, steps)),
        Question(name="1,000,000 steps to 2,000 buckets, Arrow", path="/series/query", body=whole, check=bool, accept="application/vnd.apache.arrow.stream"),
        Question(name="148 x 1,000 out of 5,000 steps, Arrow", path=f"/runs/{data.LAYERS}/layers?columns=1000", check=bool, accept="application/vnd.apache.arrow.stream"),
        Question(name="10,000 points exported", path=f"/runs/{data.LONG}/points?{urlencode({'metric': data.LOSS, 'limit': 10_000})}", check=lambda answer: len(answer["points"]["step"]) == 10_000),
    ]  # fmt: skip


def _has_points(least: int, most: int) -> Callable[[Any], bool]:
    def check(answer: Any) -> bool:
        lengths = [len(one["points"]["step"]) for one in answer["series"]]
        return all(min(least, most) <= length for length in lengths) and not any(
            one.get("error") for one in answer["series"]
        )

    return check


def _has_columns(least: int) -> Callable[[Any], bool]:
    return lambda answer: len(answer["layers"]) == 148 and len(answer["steps"]) >= least


def _has_runs(count: int) -> Callable[[Any], bool]:
    return lambda answer: len(answer["runs"]) == min(count, 1000)


def main() -> int:
    """Build the data, ask every question, save the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each question is asked")
    parser.add_argument(
        "--keep", type=Path, default=None, help="folder of a SQLite database to make or use again"
    )
    parser.add_argument(
        "--small", action="store_true", help="a hundredth of the data: only to see that it runs"
    )
    parser.add_argument("--only", default="", help="only questions whose name contains this; saves nothing")
    options = parser.parse_args()
    tenth = data.Size(long_steps=10_000, compared_runs=10, compared_steps=1000, layer_steps=1000, many_layer_steps=2000, listed_runs=10, names=20)  # fmt: skip
    size = tenth if options.small else data.Size()
    chosen = [one for one in questions(size) if options.only in one.name]
    with _server(options.engine, options.keep, size) as server:
        lines = [_ask(server, question, options.seconds) for question in chosen]
    if options.only or options.small:
        return 0
    path = record.save("query", {"engine": options.engine, "lines": lines}, name=f"query_{options.engine}")
    print(f"-> benchmarks/results/{path.name}")
    return int(any(line.get("met") is False for line in lines))


@contextlib.contextmanager
def _server(engine: str, keep: Path | None, size: data.Size) -> Iterator[Server]:
    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        url = f"sqlite:///{folder / 'benchmark.db'}"
        if engine == "postgresql":
            sys.path.append(str(Path(__file__).resolve().parents[1]))
            from tests.support.postgres import PostgresCluster

            url = stack.enter_context(contextlib.closing(PostgresCluster())).create_database()
        if engine == "postgresql" or not (folder / "benchmark.db").exists():
            print("writing the data ...", flush=True)
            database = open_database(url, clock=SystemClock())
            data.build(database, size)
            database.close()
        yield stack.enter_context(Server(folder, database=url))


def _ask(server: Server, question: Question, seconds: float) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = None if question.body is None else json.dumps(question.body)
    headers = {"Content-Type": "application/json", "Accept": question.accept}

    def once() -> bytes:
        connection.request("GET" if body is None else "POST", f"/api/v1{question.path}", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{question.name}: {answer.status} {content[:500]!r}")
        return content

    for _ in range(WARMUP):
        content = once()
    found = json.loads(content) if question.accept == "application/json" else content
    if not question.check(found):
        raise RuntimeError(f"{question.name}: not what was asked for: {content[:300]!r}")
    durations_s: list[float] = []
    until = time.perf_counter() + seconds
    cpu_before = cpu_s(server.pid)
    while len(durations_s) < MOST and (time.perf_counter() < until or len(durations_s) < LEAST):
        began = time.perf_counter()
        once()
        durations_s.append(time.perf_counter() - began)
    cpu_ms = 1000 * (cpu_s(server.pid) - cpu_before) / len(durations_s)
    connection.close()
    line = {
        "question": question.name,
        **record.spread(durations_s),
        "cpu_ms": round(cpu_ms, 1),
        "bytes": len(content),
    }
    if question.goal_ms is not None:
        met = line["p50_ms"] <= question.goal_ms[0] and line["p99_ms"] <= question.goal_ms[1]
        line |= {"goal_ms": question.goal_ms, "met": met}
    print(f"{question.name:60} p50 {line['p50_ms']:8.1f}  p99 {line['p99_ms']:8.1f}  cpu {cpu_ms:7.1f} ms  {len(content):9} bytes  "
          f"goal {question.goal_ms or '-'}", flush=True)  # fmt: skip
    return line


if __name__ == "__main__":
    sys.exit(main())
