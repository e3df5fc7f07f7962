"""`gradiometer lint`: exit codes, formats, restarts, and that what it says is what the live engine says."""

from __future__ import annotations

import csv
import io
import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradiometer_server.cli import main
from gradiometer_server.domain.folded import FoldedScalars
from gradiometer_server.lint.judge import judge
from gradiometer_server.lint.rows import Row
from tests.unit.server.alerting_timeline import run


def noise(step: int) -> float:
    """Reproducible, between -1 and 1, without a period that a rule could see."""
    return math.sin(step * 12.9898) * math.cos(step * 78.233)


def curve(num_rows: int, **at: float) -> list[dict[str, float]]:
    rows = [
        {
            "step": step,
            "loss": 2.0 + 3.0 * math.exp(-step / 100) + 0.05 * noise(step),
            "grad_norm": 1.0 + 0.1 * noise(step + 7),
        }
        for step in range(num_rows)
    ]
    for place, value in at.items():
        name, _, step = place.rpartition("_")
        rows[int(step)][name] = value
    return rows


def write(path: Path, rows: list[dict[str, float]]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def lint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["lint", *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_healthy_log_is_silent_and_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = lint(capsys, write(tmp_path / "good.csv", curve(400)))
    assert (code, out, err) == (0, "good: 400 rows, no alert\n", "")


def test_a_spike_is_1_and_named_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "bad.csv", curve(400, loss_300=9.0, grad_norm_299=60.0, loss_301=9.0))
    code, out, _ = lint(capsys, path, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 1
    assert rows == [
        {"name": "bad", "step": "299", "metric": "grad/norm", "kind": "grad_norm_spike", "severity": "error"}
    ]  # The loss follows its gradient: one story, told once.
    code, out, _ = lint(capsys, path, "--format", "json")
    (log,) = json.loads(out)
    assert [episode["kind"] for episode in log["stories"][0]["episodes"]] == ["grad_norm_spike", "loss_spike"]
    assert all(episode["advice"] for episode in log["stories"][0]["episodes"])
    code, out, _ = lint(capsys, path)
    assert "1 alert" in out
    assert "then warning: train/loss" in out


def test_a_bad_file_is_2_and_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "a.csv", curve(100, loss_90=math.nan))
    (tmp_path / "b.csv").write_text("step,loss\n1,2\n2,oops\n")
    code, out, err = lint(capsys, str(tmp_path / "b.csv"), good, str(tmp_path / "c.txt"), "--format", "csv")
    assert code == 2
    assert "a,90,train/loss,non_finite,critical" in out
    assert "b.csv, line 3, column 'loss': 'oops' is no number" in err
    assert "c.txt: is not a kind of file" in err


def test_a_folder_stands_for_its_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "one.csv", curve(50))
    (tmp_path / "two.jsonl").write_text('{"step": 1, "loss": 2}\n')
    (tmp_path / "notes.txt").write_text("not a log")
    code, out, _ = lint(capsys, str(tmp_path))
    assert code == 0
    assert out.splitlines() == ["one: 50 rows, no alert", "two: 1 row, no alert"]


def test_a_restart_is_a_new_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = curve(300)
    code, out, _ = lint(capsys, write(tmp_path / "again.csv", [*rows, *rows]))
    assert code == 0, out
    assert "starts again at step 0" in out


def test_rows_that_are_late_are_no_restart() -> None:
    rows = [Row(step=step, values={"train/loss": 1.0}, line=1) for step in range(100)]
    late = [Row(step=step, values={"eval/loss": 1.0}, line=1) for step in range(0, 100, 10)]
    assert judge([*rows, *late]).restarts == []
    assert judge([*rows, *rows[50:]]).restarts == [50]


def test_the_same_rules_as_in_the_server() -> None:
    rows = curve(300, loss_200=30.0, grad_norm_150=40.0, loss_250=math.nan)
    names = {"loss": "train/loss", "grad_norm": "grad/norm"}
    folded = [
        FoldedScalars(
            attempt=1, step=int(row["step"]), time_s=0.0, values={names[key]: row[key] for key in names}
        )
        for row in rows
    ]
    told = judge(Row(step=item.step, values=dict(item.values), line=1) for item in folded)
    in_stories = {key: episode for story in told.stories for key, episode in story.episodes.items()}
    assert {key: repr(episode.first) for key, episode in run(folded).items()} == {
        key: repr(episode.first) for key, episode in in_stories.items()
    }
    assert {episode.first.rule for episode in in_stories.values()} == {
        "loss_spike",
        "grad_norm_spike",
        "non_finite",
    }


def test_a_long_log_needs_little_memory() -> None:
    def rows() -> Iterator[Row]:
        for step in range(30_000):
            yield Row(step=step, values={"train/loss": 2.0 + 0.1 * noise(step), "grad/norm": 1.0}, line=step)

    tracemalloc.start()
    judge(rows())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000
