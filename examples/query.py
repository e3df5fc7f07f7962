"""Reads the newest run back over REST with nothing but the standard library: query.py [server URL]."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any


def call(url: str, body: object | None = None) -> Any:
    """GET, or POST if there is a body; returns the decoded answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def main() -> None:
    server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7717"
    api = server.rstrip("/") + "/api/v1"
    runs = call(f"{api}/runs?limit=1")["runs"]
    if not runs:
        raise SystemExit(f"{server} has no runs yet.")
    run = runs[0]
    print(f"{run['project']}/{run['name']}: {run['state']}, step {run['last_step']}")

    asked = {"series": [{"run": run["id"], "metric": "train/loss"}], "buckets": 8}
    for series in call(f"{api}/series/query", asked)["series"]:
        points = series["points"]
        for step, low, mean, high in zip(
            points["step"], points["min"], points["mean"], points["max"], strict=True
        ):
            print(f"  from step {step}: min {low:.4g}, mean {mean:.4g}, max {high:.4g}")

    for alert in call(f"{api}/runs/{run['id']}/alerts")["alerts"]:
        print(f"  {alert['severity']}: {alert['title']}")


if __name__ == "__main__":
    main()
