"""Which rank this process is, and the run id and attempt that all ranks of a launch share.

Ranks agree through torch.distributed's store where a process group exists; on one node without one, through the
launcher that started them all, because it is everybody's parent.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from gradiometer import process, spool, wire
from gradiometer.settings import Settings

_log: Final = logging.getLogger(__name__)

AGREEMENT_TIMEOUT_S: Final = 30.0
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_TIME_CHARS: Final = 9
_RANDOM_CHARS: Final = 4
_num_launches = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process's place: the run, the attempt (Unix milliseconds), and the rank in it."""

    run_id: str
    attempt: int
    rank: int
    local_rank: int
    world_size: int


class _Agreed(msgspec.Struct, frozen=True):
    run_id: str
    attempt: int


def identify(settings: Settings) -> Launch:
    """Find out the rank and agree with the other ranks.

    Raises:
        ValueError: the ranks have no way to agree; the message says what to set.
    """
    global _num_launches
    _num_launches += 1
    store, rank, world_size = _process_group()
    local_rank = _env_int("LOCAL_RANK", 0)
    if store is not None and world_size > 1:
        agreed = _through_store(store, settings, rank)
    elif world_size > 1:
        agreed = _through_parent(settings, world_size)
    else:
        agreed = _alone(settings)
    return Launch(
        run_id=agreed.run_id, attempt=agreed.attempt, rank=rank, local_rank=local_rank, world_size=world_size
    )


def new_run_id(time_ms: int, noise: int | None = None) -> str:
    """13 characters of Crockford's base 32, lower case: 45 bits of time, then 20 random bits. Sorts by time."""
    noise = secrets.randbits(5 * _RANDOM_CHARS) if noise is None else noise
    number = (time_ms << (5 * _RANDOM_CHARS)) | noise
    length = _TIME_CHARS + _RANDOM_CHARS
    return "".join(_ALPHABET[(number >> (5 * place)) & 31] for place in reversed(range(length)))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def own_rank() -> int:
    """This process's rank, as far as it is known now."""
    return _process_group()[1]


def mark() -> str:
    """A text that is equal on all ranks that one launcher started on this machine, and different after a new launch."""
    pid = os.getppid() if _process_group()[2] > 1 else os.getpid()
    return f"{socket.gethostname()}:{pid}:{process.start_mark(pid)}"


def _alone(settings: Settings) -> _Agreed:
    attempt = settings.attempt or max(_now_ms(), _newest_known(settings) + 1)
    return _Agreed(settings.run_id or new_run_id(attempt), attempt)


def _newest_known(settings: Settings) -> int:
    """The largest attempt of the run that is known here: a clock that was set back must not put this one before it."""
    if settings.run_id is None:
        return 0
    folder = settings.spool / spool.run_folder(settings.run_id)
    found = [int(path.name) for path in folder.glob("*/") if path.name.isascii() and path.name.isdecimal()]
    return min(max([settings.previous_attempt, *found]), wire.MAX_STEP - 1)


def _env_int(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return default


def _process_group() -> tuple[Any, int, int]:
    """The default store if a process group exists, the rank, and the number of ranks."""
    # Looked up, not imported: without torch in the process there is no process group.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        store = distributed.distributed_c10d._get_default_store()
        return store, int(distributed.get_rank()), int(distributed.get_world_size())
    world_size = max(1, _env_int("WORLD_SIZE", 1))
    rank = _env_int("RANK", 0)
    return (None, rank, world_size) if 0 <= rank < world_size else (None, 0, 1)


def _through_store(store: Any, settings: Settings, rank: int) -> _Agreed:
    # The number of the launch: a process may open several runs, and the store keeps its keys.
    key = f"gradiometer/launch/{_num_launches}"
    if rank == 0:
        mine = _alone(settings)
        store.set(key, msgspec.json.encode(mine))
        return mine
    try:
        store.wait([key], datetime.timedelta(seconds=AGREEMENT_TIMEOUT_S))
    except RuntimeError as error:
        raise ValueError(
            f"rank 0 did not open a run within {AGREEMENT_TIMEOUT_S:.0f} s, so rank {rank} does not know its id: call "
            "gradiometer.init() on every rank or on rank 0 alone, or set GRADIOMETER_RUN_ID and GRADIOMETER_ATTEMPT."
        ) from error
    return msgspec.json.decode(store.get(key), type=_Agreed)


def _through_parent(settings: Settings, world_size: int) -> _Agreed:
    if settings.run_id is not None and settings.attempt is not None:
        return _Agreed(settings.run_id, settings.attempt)
    started_ms = _start_ms(os.getppid())
    if _env_int("LOCAL_WORLD_SIZE", world_size) != world_size or started_ms is None:
        raise ValueError(
            f"{world_size} ranks on several nodes cannot agree on a run before torch.distributed is initialised: "
            "call gradiometer.init() after init_process_group(), or set GRADIOMETER_RUN_ID, and GRADIOMETER_ATTEMPT "
            "to the launch time in Unix milliseconds, on all nodes."
        )
    # torchrun restarts its workers without restarting itself; each restart is an attempt of the same run.
    restarts = _env_int("TORCHELASTIC_RESTART_COUNT", 0)
    attempt = settings.attempt or started_ms + restarts + _num_launches - 1
    if settings.run_id is not None:
        return _Agreed(settings.run_id, attempt)
    identity = f"{mark()}:{_num_launches}"
    digest = hashlib.sha256(identity.encode()).digest()
    noise = int.from_bytes(digest[:4], "little") & ((1 << (5 * _RANDOM_CHARS)) - 1)
    return _Agreed(new_run_id(started_ms, noise), attempt)


def _start_ms(pid: int) -> int | None:
    """When a process was started, in Unix milliseconds, equal for everyone who asks; None if the system hides it."""
    try:
        stat = Path("/proc/stat").read_text()
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot_s = next(int(line.split()[1]) for line in stat.splitlines() if line.startswith("btime "))
        # Field 22, counted from 1; the first after the name is field 3.
        return boot_s * 1000 + int(fields[19]) * 1000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None
