"""The image's health check, run as it stands against a real server that asks for a token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.server import Server

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "token-of-the-container-test"


def health_check(port: int, token: str) -> int:
    """Exit code of the Dockerfile's HEALTHCHECK command with another port."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith("HEALTHCHECK")]
    program, *arguments = json.loads(
        line.partition(" CMD ")[2].replace("127.0.0.1:7717", f"127.0.0.1:{port}")
    )
    assert program == "python"
    environment = {**os.environ, "GRADIOMETER_TOKEN": token}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, check=False
    ).returncode


def test_the_health_check_passes_only_with_the_servers_own_token(server: Callable[..., Server]) -> None:
    running = server(environment={"GRADIOMETER_TOKEN": TOKEN})
    assert health_check(running.port, TOKEN) == 0
    assert health_check(running.port, "another-token-entirely") != 0
    running.stop()
    assert health_check(running.port, TOKEN) != 0
