"""What README and examples tell people to do is done here, for real."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.eventually import eventually
from tests.support.server import Server

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PREAMBLE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = [torch.rand(64, 1) * 6 - 3 for _ in range(25)]
batches = [(x, torch.sin(x)) for x in inputs]
"""


def python_blocks(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_program(arguments: list[str], server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GRADIOMETER_URL", server.url)
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def finished_run(server: Server, project: str) -> dict[str, object]:
    """The one run of `project`, once the server knows that it has ended."""

    def look() -> dict[str, object] | None:
        runs = [run for run in server.get("/runs")["runs"] if run["project"] == project]
        assert [run["state"] for run in runs] == ["finished"]
        return runs[0]

    found = eventually(look, 30, what=f"the run of project {project} is finished on the server")
    assert found is not None
    return found


def test_the_loop_in_the_readme_reports_every_step(
    server: Callable[..., Server], spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = server()
    (block,) = python_blocks("README.md")
    program = tmp_path / "loop.py"
    program.write_text(PREAMBLE + block)
    run_program([str(program)], running, monkeypatch)
    run = finished_run(running, "sine")
    assert run["last_step"] == 25
    query = {
        "series": [{"run": run["id"], "metric": "train/loss"}, {"run": run["id"], "metric": "grad/norm"}]
    }
    for series in running.post("/series/query", query)["series"]:
        assert sum(series["points"]["count"]) == 25, series
        assert all(value > 0 for value in series["points"]["mean"])


@pytest.mark.slow
def test_the_examples_run_and_can_be_read_back(
    server: Callable[..., Server], spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = server()
    frameworks = {"huggingface_trainer": 100, "lightning_trainer": 100, "accelerate_loop": 100}
    steps = {"minimal": 300, "accumulation": 200} | frameworks
    for name, last_step in steps.items():
        run_program([str(ROOT / "examples" / f"{name}.py")], running, monkeypatch)

        def arrived(name: str = name, last_step: int = last_step) -> bool:
            runs = {run["name"]: run for run in running.get("/runs")["runs"]}
            assert name in runs
            assert (runs[name]["state"], runs[name]["last_step"]) == ("finished", last_step)
            return True

        eventually(arrived, 30)
    told = run_program([str(ROOT / "examples" / "query.py"), running.url], running, monkeypatch)
    assert f"examples/{name}: finished, step {last_step}" in told
    assert "mean" in told
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*steps, "query", "fsdp2_torchrun"}


@pytest.mark.parametrize(
    "document",
    sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("[de]*/**/*.md")]),
)
def test_links_lead_to_something(document: str) -> None:
    path = ROOT / document
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in LINK.findall(text):
        if not urlsplit(target).scheme and not target.startswith("#"):
            assert (path.parent / target.partition("#")[0]).exists(), target


def test_make_targets_in_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        named = set(
            re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE)
        )
        assert {first or second for first, second in named} <= targets
