"""Reading foreign training logs: which column is what, what is missing, and what a person is told of a bad file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradiometer_server.lint.names import metric_names, step_name
from gradiometer_server.lint.objects import read_lines, read_trainer_state
from gradiometer_server.lint.rows import Row, UnreadableLog
from gradiometer_server.lint.tables import read_table


def table(tmp_path: Path, text: str, **options: str) -> list[Row]:
    path = tmp_path / "run.csv"
    path.write_text(text, encoding="utf-8")
    return list(read_table(path, **options))


def lines(tmp_path: Path, *entries: object) -> list[Row]:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return list(read_lines(path))


def complaint(rows: Iterator[Row]) -> str:
    with pytest.raises(UnreadableLog) as caught:
        list(rows)
    return str(caught.value)


def test_columns_get_their_names_and_missing_cells_are_missing(tmp_path: Path) -> None:
    rows = table(
        tmp_path, "Step,loss,grad_norm,lr,loss_scale,eval_loss,when\n1,2.5,,1e-3,65536,,monday\n2,,0.5\n"
    )
    assert [(row.step, row.values, row.line) for row in rows] == [
        (1, {"train/loss": 2.5, "train/lr": 1e-3, "scaler/scale": 65536.0}, 2),
        (2, {"grad/norm": 0.5}, 3),
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_not_finite_numbers_are_read_as_written(tmp_path: Path, delimiter: str) -> None:
    text = "step,loss,grad_norm\n1,nan,inf\n2,NaN,-Infinity\n3,None,\n4.0,1,2\n".replace(",", delimiter)
    rows = table(tmp_path, text)
    assert [row.step for row in rows] == [1, 2, 4]  # Step 3 has nothing.
    assert math.isnan(rows[0].values["train/loss"])
    assert rows[0].values["grad/norm"] == math.inf
    assert rows[1].values["grad/norm"] == -math.inf


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "run.csv, line 1: is empty"),
        ("a,b\n1,2\n", "line 1: has no column that holds the step"),
        ("step,loss\n1,2\n2,two\n", "line 3, column 'loss': 'two' is no number"),
        ("step,loss\n1,1_000\n2,3\n3,x\n", "line 4, column 'loss': 'x' is no number"),
        ("metric,step,value\nloss,1,2\n", "line 1: has one value per row"),
        ("step,loss\n1,2,3\n", "line 2: has 3 cells, but the header has 2"),
        ("step,loss\n1.5,2\n", "line 2, column 'step': the step is '1.5', not a whole number"),
        ("step,loss\n,2\n", "line 2, column 'step': the step is '', not a whole number"),
        ("step,loss\nnan,2\n", "line 2, column 'step'"),
        ("step,loss\n1e300,2\n", "line 2, column 'step'"),
        ('step,loss\n1,"' + "9" * 200_000 + '"\n', "is not CSV"),
    ],
)
def test_a_bad_table_says_where(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "run.csv"
    path.write_text(text, encoding="utf-8")
    if "1_000" in text:
        # Its first value decides that a column is text; later ones are then not read.
        assert [row.values for row in read_table(path)] == []
        return
    assert told in complaint(read_table(path))


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_bytes(b"step,loss\n1,\xff\xfe\n")
    assert "is not UTF-8 text" in complaint(read_table(tmp_path / "run.csv"))
    assert "no such file" in complaint(read_table(tmp_path / "other.csv"))
    assert "is a directory" in complaint(read_lines(tmp_path))


def test_the_step_column_can_be_named(tmp_path: Path) -> None:
    rows = table(tmp_path, "epoch,loss\n1,2\n", step_column="epoch")
    assert [(row.step, row.values) for row in rows] == [(1, {"train/loss": 2.0})]
    with pytest.raises(UnreadableLog, match="has no column 'batch'"):
        table(tmp_path, "epoch,loss\n1,2\n", step_column="batch")


def test_hostile_names_stay_apart_printable_and_short(tmp_path: Path) -> None:
    names = ["loss", "train/loss", "loss", "", "\x1b[31mred\n", "x" * 500, "=cmd()"]
    found = metric_names(names)
    assert found[:4] == ["train/loss", "train/loss (2)", "loss", ""]
    assert all(name.isprintable() and len(name) <= 210 for name in found)
    assert len({name for name in found if name}) == len(found) - 1
    assert step_name(["loss", "GLOBAL_STEP", "step "]) == "step "
    path = tmp_path / "run.csv"
    path.write_text("step,a\x1b[2J\n1,2\n2,\x1b]0;owned\x07\n")
    assert "\x1b" not in complaint(read_table(path))


def test_too_many_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableLog, match="columns"):
        table(tmp_path, "step," + ",".join(f"m{i}" for i in range(3000)) + "\n")


def test_objects_inside_are_flattened_and_words_are_numbers(tmp_path: Path) -> None:
    rows = lines(
        tmp_path,
        {"step": 1, "train": {"loss": 2.0, "grad_norm": "NaN"}, "ok": True, "note": "x", "data": [1]},
        "",
        '{"global_step": 2, "loss": NaN, "huge": 1' + "0" * 400 + "}",
        {"step": 3},
    )
    assert [row.step for row in rows] == [1, 2]
    assert rows[0].values["train/loss"] == 2.0
    assert set(rows[0].values) == {"train/loss", "grad/norm"}
    assert math.isnan(rows[0].values["grad/norm"])
    assert rows[1].values["huge"] == math.inf


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: holds list where an object is expected"),
        ('{"loss": 1}', "line 2: has no step"),
        ('{"step": 1.5, "loss": 1}', "line 2, column 'step': the step is 1.5"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_bad_line_says_where(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(UnreadableLog) as caught:
        lines(tmp_path, {"step": 1, "loss": 2}, line)
    assert told in str(caught.value)


def test_the_state_of_a_trainer(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    history = [
        {"loss": 2.0, "grad_norm": 1.5, "learning_rate": 1e-4, "epoch": 0.1, "step": 10},
        {"eval_loss": 1.9, "eval_runtime": 3.0, "epoch": 0.1, "step": 10},
    ]
    path.write_text(json.dumps({"best_metric": None, "log_history": history}))
    rows = list(read_trainer_state(path))
    assert rows[0].values == {"train/loss": 2.0, "grad/norm": 1.5, "train/lr": 1e-4, "epoch": 0.1}
    assert rows[1].values["eval/loss"] == 1.9
    for bad, told in [
        ("{}", "has no list"),
        ('{"log_history": [1]}', "entry 1"),
        ("{\n,", "line 2: is not JSON"),
    ]:
        path.write_text(bad)
        assert told in complaint(read_trainer_state(path))
