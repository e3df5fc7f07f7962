"""The command line: what each command does, and what it says when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradiometer import __version__, cli
from gradiometer.settings import DEFAULT_URL


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    for command in ("serve", "demo", "sync", "db"):
        assert f"\n  {command} " in printed
    assert DEFAULT_URL in printed


def test_no_command_is_an_error_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: gradiometer COMMAND" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradiometer {__version__}\n"


def test_other_commands_become_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        pass

    executed: list[object] = []

    def execv(program: str, arguments: Sequence[str]) -> None:
        executed.extend([program, list(arguments)])
        raise Replaced

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(Replaced):
        cli.main(["db", "upgrade", "--url", "sqlite:///x"])
    command = [sys.executable, "-m", "gradiometer_server", "db", "upgrade", "--url", "sqlite:///x"]
    assert executed == [sys.executable, command]


def test_sync_of_a_folder_that_is_not_there_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sync", str(tmp_path / "nothing")]) == 1
    assert f"{tmp_path / 'nothing'} is no folder" in capsys.readouterr().err
    # The default spool is made by the first run.
    monkeypatch.setenv("GRADIOMETER_SPOOL", str(tmp_path / "later"))
    assert cli.main(["sync"]) == 0
    assert "Nothing waits" in capsys.readouterr().out


def test_output_that_nobody_reads_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    for command in (["--help"], ["sync", str(tmp_path)]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "gradiometer", *command],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        os.close(writing)
        assert done.stderr == ""
        assert done.returncode == cli.EXIT_BROKEN_PIPE


def test_an_unknown_command_is_named_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["foo"]) == 2
    told = capsys.readouterr().err
    assert "no command 'foo'" in told
    assert "serve" in told
    assert "sync" in told


def test_a_missing_server_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["serve"]) == 1
    assert 'pip install "gradiometer[server]"' in capsys.readouterr().err


def test_the_module_runs_as_the_command() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "gradiometer", "--version"], capture_output=True, text=True, check=True
    )
    assert answer.stdout == f"gradiometer {__version__}\n"


def test_the_command_reaches_the_real_server() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "gradiometer", "serve", "--help"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "--port" in answer.stdout
    assert "usage: gradiometer serve" in answer.stdout


def test_sync_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sync", str(tmp_path)]) == 0
    assert "Nothing waits in" in capsys.readouterr().out


def test_sync_looks_in_the_configured_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADIOMETER_SPOOL", str(tmp_path))
    assert cli.main(["sync"]) == 0
    assert str(tmp_path) in capsys.readouterr().out


def test_sync_names_a_bad_address_and_a_damaged_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sync", str(tmp_path), "--url", "ftp://x"]) == 1
    assert "GRADIOMETER_URL is 'ftp://x'" in capsys.readouterr().err
    (tmp_path / "run" / "1").mkdir(parents=True)
    (tmp_path / "run" / "1" / "run.json").write_text("{}")
    assert cli.main(["sync", str(tmp_path), "--patience", "0.1"]) == 1
    assert "run.json cannot be understood" in capsys.readouterr().err
