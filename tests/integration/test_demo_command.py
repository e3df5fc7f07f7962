"""The demo's command line: ends cleanly at any moment, and says what was wrong with what it was told."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gradiometer import cli
from gradiometer.demo import command, faults
from tests.support.demo_process import START_TIMEOUT_S, DemoProcess
from tests.support.eventually import eventually


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_command_knows_every_fault() -> None:
    assert command.FAULTS == faults.FAULTS


def test_ctrl_c_while_it_trains(tmp_path: Path) -> None:
    with DemoProcess(tmp_path, "--steps", "100000") as demo:
        demo.printed(re.compile(r"(step +20/)"), START_TIMEOUT_S)
        assert demo.interrupt() == 0, demo.output
        assert "Traceback" not in demo.output
        assert "stopping" in demo.output


@pytest.mark.parametrize("moment", ["Gradiometer is at", "gradiometer: run "])
def test_ctrl_c_while_it_starts(moment: str, tmp_path: Path) -> None:
    with DemoProcess(tmp_path, "--steps", "100000") as demo:
        demo.printed(re.compile(f"({moment})"), START_TIMEOUT_S)
        assert demo.interrupt() == 0, demo.output
        assert "Traceback" not in demo.output


def test_it_can_end_by_itself(tmp_path: Path) -> None:
    with DemoProcess(tmp_path, "--steps", "25", "--exit") as demo:
        assert demo.wait() == 0, demo.output
        assert "step    25/25" in demo.output


def test_its_server_ends_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    with DemoProcess(tmp_path, "--steps", "100000") as demo:
        demo.printed(re.compile(r"(step +20/)"), START_TIMEOUT_S)
        family = demo.kill()
        assert any("serve" in process.cmdline() for process in family)
        eventually(lambda: not any(map(is_alive, family)), 30.0, what="everything ended")
    # The server had time to hear from the uplink how its trainer ended.
    assert not list((tmp_path / "spool").rglob("*.seg"))


def test_output_that_nobody_reads_ends_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradiometer", "demo", "--no-browser", "--steps", "100000"]
    command += ["--database", f"sqlite:///{tmp_path / 'demo.db'}"]
    settings = {**os.environ, "GRADIOMETER_SPOOL": str(tmp_path / "spool")}
    with (tmp_path / "errors").open("w+") as errors:
        demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=settings)
        assert demo.stdout is not None
        assert demo.stdout.readline().startswith("Gradiometer is at")
        demo.stdout.close()
        assert demo.wait(START_TIMEOUT_S) == cli.EXIT_BROKEN_PIPE
        errors.seek(0)
        assert "Traceback" not in errors.read()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with DemoProcess(tmp_path, "--port", str(port)) as demo:
            assert demo.wait() == 1
            assert f"port {port} is in use" in demo.output
            assert "Traceback" not in demo.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--port", "70000"], "--port is 70000"),
        (["--break", "gremlin"], "nan"),
        (["--break-at", "50"], "needs --break"),
        (["--steps", "50", "--break", "nan"], "outside of 1..50"),
        (["--keep-serving", "--exit"], "not allowed with"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradiometer", "demo", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
