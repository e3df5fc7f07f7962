"""Redraws the pictures in the documentation: `python -m tests.support.take_screenshots docs/images`.

Trains the demo for real (once healthy, once with a fault), serves what it left in the database, and photographs the page.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser.screenshots import take_all
from tests.support.server import Server

DEMOS = (["--steps", "400"], ["--steps", "200", "--break", "nan"])
DEMO_TIMEOUT_S = 600.0


def seed(database_url: str, folder: Path) -> None:
    """Train each demo to its end into the database."""
    environment = {**os.environ, "GRADIOMETER_SPOOL": str(folder / "spool")}
    for arguments in DEMOS:
        command = [sys.executable, "-m", "gradiometer", "demo", "--no-browser", "--exit"]
        command += ["--database", database_url, *arguments]
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True, timeout=DEMO_TIMEOUT_S)


def main(out_dir: Path) -> None:
    """Seed, serve, photograph."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database_url = f"sqlite:///{folder / 'screenshots.db'}"
        seed(database_url, folder)
        server = Server(database_url, folder, arguments=[], environment={}).start()
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            begun_s = time.monotonic()
            take_all(server.url, out_dir)
        finally:
            server.close()
    for picture in sorted(out_dir.glob("*.png")):
        print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB")
    print(f"photographed in {time.monotonic() - begun_s:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
