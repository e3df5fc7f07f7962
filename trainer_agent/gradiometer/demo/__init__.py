"""`gradiometer demo`: a server, a browser and a small real training, to see the whole path at work.

Nothing here is imported by the agent itself; the demo needs torch and the extra `server`.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments `argv`; returns the process's exit code."""
    from gradiometer.demo.command import run_command

    return run_command(argv)
