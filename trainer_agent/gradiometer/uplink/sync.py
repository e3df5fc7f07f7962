"""`gradiometer sync`: delivers what lies in a spool and is not in the care of a running uplink."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gradiometer import spool
from gradiometer.spool import SpoolError
from gradiometer.uplink.sidecar import Options, Uplink
from gradiometer.uplink.state import Lock, UplinkState, read_state
from gradiometer.uplink.transport import check_url


def sync(path: Path, *, url: str, token: str | None, patience_s: float) -> int:
    """Deliver every attempt below `path` and print what happened to each; 1 if one could not be delivered."""
    try:
        url = check_url(url)
        attempts = find_attempts(path)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"gradiometer sync: {error}\n")
        return 1
    if not attempts:
        _say(f"Nothing waits in {path}.")
        return 0
    delivered = [_sync_attempt(attempt, url, token, patience_s) for attempt in attempts]
    return 0 if all(delivered) else 1


def find_attempts(path: Path) -> list[Path]:
    """Folders of attempts below a spool, a run or an attempt, in order. Raises `OSError` if `path` cannot be listed."""
    if not path.exists():
        return []
    patterns = ("run.json", "*/run.json", "*/*/run.json")
    return sorted({found.parent.absolute() for pattern in patterns for found in path.glob(pattern)})


def _sync_attempt(directory: Path, url: str, token: str | None, patience_s: float) -> bool:
    lock = Lock(directory)
    try:
        run = spool.read_run(directory)
        title = f"run {run.run_id}, attempt {directory.name}"
        if not lock.acquire():
            return _in_care_of_another(title, read_state(directory))
        options = Options(drain=True, give_up_s=patience_s)
        uplink = Uplink(directory, url=url, token=token, lock=lock, options=options)
        asyncio.run(uplink.run())
        if not uplink.sources and not any(directory.glob("rank-*")):
            _say(f"{title}: was delivered by somebody else in the meantime")
            return True
    except (SpoolError, OSError) as error:
        sys.stderr.write(f"{directory}: {error}\n")
        return False
    finally:
        lock.release()
    _say(f"{title}: {_outcome(uplink, directory)}")
    return uplink.delivered


def _in_care_of_another(title: str, state: UplinkState | None) -> bool:
    """Say which uplink delivers this; whether nothing keeps it from doing so."""
    if state is None:
        _say(f"{title}: being delivered by an uplink that has just begun")
        return True
    if not state.last_error:
        _say(f"{title}: being delivered to {state.url} by the uplink with pid {state.pid}")
        return True
    _say(
        f"{title}: NOT delivered: the uplink with pid {state.pid} tries to send it to {state.url}: {state.last_error} "
        f"To send it from here, end that process first: kill {state.pid}"
    )
    return False


def _outcome(uplink: Uplink, directory: Path) -> str:
    num_sent = sum(uplink.num_sent.values())
    num_rejected = sum(source.num_rejected for source in uplink.sources.values())
    parts = [f"sent {num_sent} records of {len(uplink.sources)} ranks"]
    if num_rejected:
        parts.append(f"{num_rejected} were refused by the server, see its page of the run")
    if not uplink.delivered:
        parts.append(
            f"NOT complete: {uplink.last_error or 'the server did not acknowledge the rest in time'}"
        )
    for source in uplink.sources.values():
        if uplink.delivered and not source.closed:
            where = (
                "still runs" if source.alive() else f"ran on {source.hostname} and did not say how it ended"
            )
            parts.append(f"rank {source.rank} {where}: {directory} is kept")
    return "; ".join(parts)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
