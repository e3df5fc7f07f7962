"""Dockerfile and docker-compose.yml: no engine is at hand, so they are checked as far as that allows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"POSTGRES_PASSWORD": "secret-of-the-test", "GRADIOMETER_TOKEN": "token-of-the-test-0123"}
SERVICE_KEYS = {
    "build",
    "image",
    "restart",
    "depends_on",
    "environment",
    "volumes",
    "healthcheck",
    "ports",
}
HEALTH_KEYS = {"test", "interval", "timeout", "retries", "start_period"}
VARIABLE = re.compile(r"\$\{(\w+)(?:(:\?|:-)([^}]*))?\}")


class MissingVariable(ValueError):
    """A required variable of the compose file is not set."""


def has_compose() -> bool:
    """Whether `docker compose` can be run here; the client alone may come without the plugin."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


def substitute(text: str, variables: dict[str, str]) -> str:
    """Compose's own substitution, for the three forms that our file uses."""

    def value(match: re.Match[str]) -> str:
        name, operator, word = match.groups()
        if variables.get(name):
            return variables[name]
        if operator == ":?":
            raise MissingVariable(f"{name}: {word}")
        return word if operator == ":-" else ""

    without_comments = re.sub(r"(?m)^\s*#.*$", "", text)
    return VARIABLE.sub(value, without_comments)


def composed(variables: dict[str, str]) -> dict[str, Any]:
    """The resolved compose file: by `docker compose config` where it exists, else by the same rules in Python.

    Raises:
        MissingVariable: a required variable is not set.
    """
    if has_compose():
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
        command = ["docker", "compose", "config", "--format", "json"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MissingVariable(done.stderr)
        resolved: dict[str, Any] = json.loads(done.stdout)
        return resolved
    read: dict[str, Any] = yaml.safe_load(
        substitute((ROOT / "docker-compose.yml").read_text(encoding="utf-8"), variables)
    )
    assert set(read) <= {"name", "services", "volumes"}
    for service in read["services"].values():
        assert set(service) <= SERVICE_KEYS
        assert ("build" in service) != ("image" in service)
        assert set(service.get("healthcheck", {})) <= HEALTH_KEYS
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in read["volumes"]
        for name, wanted in service.get("depends_on", {}).items():
            assert wanted["condition"] == "service_healthy"
            assert "healthcheck" in read["services"][name]
    return read


@pytest.mark.parametrize("missing", sorted(SETTINGS))
def test_compose_refuses_to_start_without_its_secrets(missing: str) -> None:
    variables = {name: value for name, value in SETTINGS.items() if name != missing}
    with pytest.raises(MissingVariable, match=missing):
        composed(variables)


def test_compose_gives_the_server_its_database_and_token() -> None:
    services = composed(SETTINGS)["services"]
    environment = services["server"]["environment"]
    assert environment["GRADIOMETER_TOKEN"] == SETTINGS["GRADIOMETER_TOKEN"]
    assert environment["GRADIOMETER_DATABASE_URL"] == (
        "postgresql+psycopg://gradiometer:secret-of-the-test@postgres:5432/gradiometer"
    )
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD"] == SETTINGS["POSTGRES_PASSWORD"]


def test_compose_keeps_the_database_in_a_volume_and_off_the_network() -> None:
    resolved = composed(SETTINGS)
    assert "postgres-data" in resolved["volumes"]
    assert not resolved["services"]["postgres"].get("ports")
    (port,) = resolved["services"]["server"]["ports"]
    address = port if isinstance(port, str) else f"{port['host_ip']}:{port['published']}:{port['target']}"
    assert address == "127.0.0.1:7717:7717"


def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile in order, continuation lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_made_by_steps_that_make_also_runs() -> None:
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    steps = [rest for word, rest in dockerfile() if word == "RUN"]
    assert [step.split()[0] for step in steps] == ["python", "/opt/gradiometer/bin/python", "useradd"]
    assert steps[0].startswith("python -m venv")
    assert "-m venv" in make
    assert steps[1].endswith('-m pip install ".[server]"')
    assert re.search(r'-m pip install .*"\.\[server\]"', make)
    pins = [rest for word, rest in dockerfile() if word == "ENV" and "PIP_CONSTRAINT" in rest]
    assert len(pins) == 1
    for variable in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"):
        assert f"{variable}=constraints.txt" in pins[0]
        assert f"export {variable} := constraints.txt" in make


def test_the_image_serves_as_somebody_without_rights_and_reports_its_health() -> None:
    instructions = dict(dockerfile())
    assert instructions["USER"] == "gradiometer"
    command = json.loads(instructions["CMD"])
    assert command == ["gradiometer", "serve", "--host", "0.0.0.0", "--port", instructions["EXPOSE"]]
    assert f"127.0.0.1:{instructions['EXPOSE']}/healthz" in instructions["HEALTHCHECK"]
