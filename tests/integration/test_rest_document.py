"""docs/rest.md: every example runs, and what it says is answered is answered."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, layer_schema, scalar_schema

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "rest.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"```sh\n(.*?)```\n(?:```json\n(.*?)```)?", re.DOTALL)
EXAMPLES = [(found[1], found[2]) for found in EXAMPLE.finditer(TEXT)]
STEPS = 1000


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    made = Server(f"sqlite:///{folder / 'a.db'}", folder, arguments=[], environment={})
    try:
        made.start()
        for name, level in (("demo", 2.0), ("demo-2", 3.0)):
            odd = {700: 1e6, 800: math.nan} if name == "demo" else {}
            with WireClient(made.url, name, project="demo") as client:
                client.hello()
                client.send(scalar_schema("train/loss", "train/tokens"), layer_schema(("a", 4)))
                client.send(frame({s: (odd.get(s, level), 4096.0 * s) for s in range(1, STEPS + 1)}))
                client.send(
                    frame(dict.fromkeys(range(1, 11), (4.0, 0.0, 1.0, -1.0, 1.0, 0.0, 0.0)), schema_id=2)
                )
                client.send(exit_event(0))
        eventually(lambda: [run["last_step"] for run in made.get("/runs")["runs"]] == [STEPS] * 2, 20)
        eventually(lambda: {run["state"] for run in made.get("/runs")["runs"]} == {"finished"}, 20)
        yield made
    finally:
        made.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("command", "answer"), EXAMPLES, ids=[f"example-{n}" for n in range(len(EXAMPLES))])
def test_the_example_does_what_it_says(one: Server, command: str, answer: str | None) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], env={**os.environ, "URL": one.url}, capture_output=True, text=True, timeout=60, check=True
    )  # fmt: skip
    if answer is not None:
        assert json.loads(done.stdout) == json.loads(answer)
    elif "format=csv" in command:
        assert int(done.stdout) == STEPS + 1
    elif "wc -c" in command:
        assert int(done.stdout) > 10_000
    else:
        assert json.loads(done.stdout)["layers"] == ["a"]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 9
    assert sum(answer is not None for _, answer in EXAMPLES) >= 6
