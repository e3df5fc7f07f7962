"""`python -m gradiometer.uplink ATTEMPT_DIRECTORY --url URL [--detach]`: the uplink process of one attempt on one node."""

from __future__ import annotations

import argparse
import asyncio
import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gradiometer.spool import SpoolError
from gradiometer.uplink.state import LOG, Lock

_LOG_BYTES: Final = 1024 * 1024
_READY: Final = b"+"


def main() -> int:
    """Run the uplink; the exit code is 0 if the server has everything, or another uplink is already at work."""
    parser = argparse.ArgumentParser(prog="python -m gradiometer.uplink", description=__doc__)
    parser.add_argument("attempt_directory", type=Path)
    parser.add_argument("--url", required=True, help="the server, e.g. http://127.0.0.1:7717")
    parser.add_argument(
        "--detach", action="store_true", help="return as soon as it listens; go on in the background"
    )
    arguments = parser.parse_args()
    directory = arguments.attempt_directory.absolute()
    if not arguments.detach:
        return _run(directory, arguments.url, lambda: None)
    reading, writing = os.pipe()
    if os.fork():
        # The launcher. Its exit hands the uplink over to init, so that the trainer never has it as a child.
        os.close(writing)
        return 0 if os.read(reading, 1) == _READY else 1
    os.close(reading)

    def tell_launcher() -> None:
        os.write(writing, _READY)
        os.close(writing)

    return _run(directory, arguments.url, tell_launcher)


def _run(directory: Path, url: str, ready: Callable[[], None]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    lock = Lock(directory)
    try:
        if not lock.acquire():
            ready()
            return 0
        # Not at the top: a launcher, and a process that finds the lock taken, need no WebSocket client.
        from gradiometer.credentials import token_from_environment
        from gradiometer.spool import linger_from_environment
        from gradiometer.uplink.sidecar import Options, Uplink
        from gradiometer.uplink.transport import check_url

        _log_to(directory / LOG)
        uplink = Uplink(
            directory,
            url=check_url(url),
            token=token_from_environment(),
            lock=lock,
            options=Options(linger_s=linger_from_environment()),
            ready=ready,
        )
    except (SpoolError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0 if asyncio.run(uplink.run()) else 1


def _log_to(path: Path) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1)
    logging.basicConfig(
        level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s"
    )
    # Its tracebacks of every refused connection say nothing that our own one line does not.
    logging.getLogger("websockets").setLevel(logging.CRITICAL)


if __name__ == "__main__":
    sys.exit(main())
