"""The wheel, as a user gets it: complete, and able to serve from a folder that knows nothing of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gradiometer.capture.native import build
from tests.support.server import Server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, timeout=300, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files in a folder; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        str(wheel),
    ]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT)
    return folder


def test_the_wheel_carries_page_and_migrations(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "gradiometer_server/static/index.html" in names
    assert "gradiometer_server/_migrations/env.py" in names
    revisions = {path.name for path in (ROOT / "migrations" / "versions").glob("*.py")}
    assert revisions
    assert revisions <= {Path(name).name for name in names if "_migrations/versions" in name}
    assert not [name for name in names if "node_modules" in name or name.startswith("tests")]


@pytest.mark.skipif(not any(shutil.which(name) for name in build.COMPILERS), reason="no C compiler")
def test_the_wheel_carries_the_kernel_and_is_for_this_platform(wheel: Path, installed: Path) -> None:
    assert wheel.name.endswith(f"-{build.wheel_tag()}.whl")
    program = "from gradiometer.capture import native; print(native.build.LIBRARY); assert native.load(), native.why_not()"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith(str(installed))


def test_the_installed_wheel_serves_its_page_and_an_empty_database(
    installed: Path, server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = {"PYTHONPATH": str(installed)}
    where = subprocess.run(
        [sys.executable, "-c", "import gradiometer_server; print(gradiometer_server.__file__)"],
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.startswith(str(installed))
    running = server(environment=path)
    page = httpx.get(running.url)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" in page.text
    assert running.get("/runs") == {"runs": [], "next_cursor": None}
