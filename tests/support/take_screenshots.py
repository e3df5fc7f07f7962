"""Redraws the pictures in the documentation: `python -m tests.support.take_screenshots docs/images`.

Trains the demo for real (once healthy, once with a fault), serves what it left in the database, and photographs the page.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser.screenshots import take_all
from tests.support.eventually import eventually
from tests.support.server import Server

DEMOS = (["--steps", "400"], ["--steps", "200", "--break", "nan"])
DEMO_TIMEOUT_S = 300.0


def seed(database_url: str, folder: Path) -> None:
    """Train each demo into the database; a demo keeps serving when it is done, so it is told to end."""
    for number, arguments in enumerate(DEMOS):
        log = folder / f"demo-{number}.log"
        environment = {**os.environ, "GRADIOMETER_DATABASE_URL": database_url}
        environment["GRADIOMETER_SPOOL"] = str(folder / f"spool-{number}")
        command = [sys.executable, "-m", "gradiometer", "demo", "--no-browser", "--port", "0", *arguments]
        with log.open("wb") as output:
            demo = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
        try:
            eventually(
                lambda log=log: "still serving" in log.read_text(errors="replace").lower(),
                DEMO_TIMEOUT_S,
                what=f"`demo {' '.join(arguments)}` has trained; see {log}",
                interval_s=0.5,
            )
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(60)


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
