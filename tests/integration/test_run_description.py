"""How a run is described: what `init` lets through the server keeps as it is, and what is too much for it costs no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradiometer as gm
from gradiometer import cli, limits, wire
from gradiometer import spool as spool_module
from gradiometer_server.ingest.cleaning import cleaned
from tests.support.server import Server
from tests.support.wire_client import exit_event, frame, scalar_schema

FITTING: list[dict[str, Any]] = [
    {"name": "ñ" * limits.MAX_LABEL_CHARS},
    {"group": "g" * limits.MAX_LABEL_CHARS},
    {"tags": [f"t{number}" for number in range(limits.MAX_TAGS)]},
    {"notes": "two\nlines" + "x" * (limits.MAX_NOTES_CHARS - 9)},
    {"config": {"text": "x" * (limits.MAX_CONFIG_BYTES - 100)}},
    {"config": {"deep": {str(depth): {"list": [[[[depth]]]]} for depth in range(9)}}},
]


@pytest.mark.parametrize("arguments", FITTING, ids=lambda arguments: next(iter(arguments)))
def test_what_init_lets_through_the_server_keeps_as_it_is(spool: Path, arguments: dict[str, Any]) -> None:
    with gm.init(mode="offline", **arguments) as run:
        assert run.directory is not None
        described = spool_module.read_run(run.directory.parent)
        source = spool_module.read_source(run.directory).source
    hello = wire.Hello(protocol=wire.PROTOCOL_VERSION, agent_version="test", run=described, sources=(source,))
    assert cleaned(hello) == (hello, ())


def test_a_spool_described_beyond_every_limit_is_delivered(
    server: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = server()
    run = wire.RunInfo(
        run_id="wordy",
        project="tests",
        name="two\nlines" + "n" * 600,
        created_s=1_800_000_000.0,
        config={"lr": 0.1, "data": "x" * 2_000_000},
        tags=("", "fine", "a\x1b[2J"),
        notes="x" * 100_000,
        group="\x07",
    )
    source = wire.SourceInfo(rank=0, attempt=1_800_000_000_000, environment={"command": "c" * 100_000})
    writer = spool_module.open_source(tmp_path / "spool", run, source)
    writer.append_batch([scalar_schema("train/loss"), frame({1: [0.5]}), exit_event()])
    writer.close()
    assert cli.main(["sync", str(tmp_path / "spool"), "--url", one.url]) == 0, capsys.readouterr()
    shown = one.get("/runs/wordy")
    assert shown["name"].startswith("two lines")
    assert len(shown["name"]) == limits.MAX_LABEL_CHARS
    assert shown["tags"] == ["fine", "a [2J"]
    assert shown["group"] is None
    assert shown["config"] == {"lr": 0.1, limits.LEFT_OUT: ["data"]}
    assert shown["latest"] == {"train/loss": 0.5}
    assert not (tmp_path / "spool" / "wordy").exists()
    assert "made to fit: run.name, run.tags, run.group, run.notes, run.config, sources" in one.log


def test_one_set_of_limits_serves_both_ends() -> None:
    assert wire.limits is limits
    assert limits.MAX_ID_CHARS == wire.MAX_ID_CHARS
