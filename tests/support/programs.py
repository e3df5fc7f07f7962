"""Finds PostgreSQL and Chromium on this machine, or installs them from the distribution, or says how to.

`python -m tests.support.programs` is what `make test` runs first: a missing program stops the tests with
instructions and never turns into skipped tests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM_PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
POSTGRES_PLACES = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)
DEBIAN_PACKAGES = {
    "Chromium": ["chromium", "fonts-dejavu-core"],
    "PostgreSQL": ["postgresql"],
    "libatomic": ["libatomic1"],
}
"""`libatomic` is what the Node inside the Python package playwright needs and a bare Debian does not have."""

INSTRUCTIONS = """\
{missing}: not found on this machine, and the tests need it.
  Debian, Ubuntu   sudo apt-get update && sudo apt-get install {packages}
  Fedora           sudo dnf install chromium postgresql-server libatomic
  macOS            brew install postgresql@17 && brew install --cask chromium
  elsewhere        put `initdb` and `postgres` (PostgreSQL 14 or newer) and `chromium` on the PATH,
                   or name them: GRADIOMETER_TEST_POSTGRES=<folder with initdb>, GRADIOMETER_TEST_CHROMIUM=<program>
  Ubuntu's `chromium` is a snap: where snaps do not run, install Google Chrome, or run
                   .venv/bin/playwright install chromium
Then run `make test` again. Nothing was skipped; no test has run."""


class ProgramMissing(RuntimeError):
    """A program that the tests need is not on this machine; the message says what to install."""

    def __init__(self, *missing: str) -> None:
        packages = " ".join(name for program in missing for name in DEBIAN_PACKAGES[program])
        super().__init__(INSTRUCTIONS.format(missing=" and ".join(missing), packages=packages))


def find_postgres() -> Path:
    """Folder with `initdb` and `postgres`: the one named by the environment, on the PATH, or the newest installed.

    Raises:
        ProgramMissing: there is none.
    """
    named = os.environ.get("GRADIOMETER_TEST_POSTGRES")
    on_path = shutil.which("initdb")
    candidates = [Path(named)] if named else []
    candidates += [Path(on_path).resolve().parent] if on_path else []
    for pattern in POSTGRES_PLACES:
        candidates += sorted(Path("/").glob(pattern.lstrip("/")), key=_version, reverse=True)
    for folder in candidates:
        if (folder / "initdb").is_file() and (folder / "postgres").is_file():
            return folder
    raise ProgramMissing("PostgreSQL")


def find_chromium() -> Path:
    """The Chromium or Chrome to test with: named by the environment, on the PATH, or one that Playwright downloaded.

    Raises:
        ProgramMissing: there is none.
    """
    named = os.environ.get("GRADIOMETER_TEST_CHROMIUM")
    names = (named, *CHROMIUM_NAMES) if named else CHROMIUM_NAMES
    for name in (*names, *CHROMIUM_PLACES):
        found = shutil.which(name)
        if found and not _is_snap_stub(Path(found)):
            return Path(found)
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", str(Path.home() / ".cache/ms-playwright")))
    for program in sorted(cache.glob("chromium-*/chrome-linux*/chrome"), key=_version, reverse=True):
        return program
    raise ProgramMissing("Chromium")


def find_libatomic() -> Path:
    """Playwright's own Node, if it can run here.

    Raises:
        ProgramMissing: its shared library is not installed.
    """
    package = importlib.util.find_spec("playwright")
    assert package is not None, "playwright is not installed: run `make test`, which installs it"
    assert package.origin is not None
    node = Path(package.origin).with_name("driver") / "node"
    done = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
    if "libatomic" in done.stderr:
        raise ProgramMissing("libatomic")
    return node


def _is_snap_stub(program: Path) -> bool:
    """Ubuntu's chromium-browser package without its snap is a shell script that only prints an error."""
    if "snap" in str(program.resolve()):
        return shutil.which("snap") is None
    with program.open("rb") as file:
        start = file.read(4096)
    return start.startswith(b"#!") and b"snap install" in start


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", str(path)))


def missing_programs() -> list[str]:
    """Names of the needed programs that are not here."""
    missing = []
    finders = (("PostgreSQL", find_postgres), ("Chromium", find_chromium), ("libatomic", find_libatomic))
    for name, find in finders:
        try:
            print(f"{name}: {find()}")
        except ProgramMissing:
            missing.append(name)
    return missing


def can_install() -> bool:
    """Whether this is a Debian family system on which we are root."""
    return hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(missing: list[str]) -> None:
    """Install the distribution's own packages. Failure is not fatal here: the caller looks again."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = [name for program in missing for name in DEBIAN_PACKAGES[program]]
    for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *packages]):
        print("$ apt-get", *command, flush=True)
        subprocess.run(["apt-get", *command], env=environment, check=False, stdin=subprocess.DEVNULL)


def main() -> int:
    """Make sure that all of them are here; returns the exit code."""
    missing = missing_programs()
    if missing and can_install():
        install(missing)
        missing = missing_programs()
    if missing:
        print(ProgramMissing(*missing), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
