"""Describes the run and this process for the server: versions, hardware, command line without secrets."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from typing import Any, Final

from gradiometer import __version__, wire
from gradiometer.launch import Launch
from gradiometer.plain import encodable
from gradiometer.settings import Settings

_SECRET: Final = re.compile(r"token|secret|passw|api[-_]?key|credential|auth", re.IGNORECASE)
_MAX_COMMAND_CHARS: Final = 2000
HIDDEN: Final = "***"


def run_info(settings: Settings, launch: Launch) -> wire.RunInfo:
    """The run as the user named it."""
    return wire.RunInfo(
        run_id=launch.run_id,
        project=settings.project,
        name=settings.name or launch.run_id,
        created_s=time.time(),
        config=settings.config,
        tags=settings.tags,
        notes=settings.notes,
        group=settings.group,
    )


def source_info(settings: Settings, launch: Launch) -> wire.SourceInfo:
    """This rank in this attempt."""
    return wire.SourceInfo(
        rank=launch.rank,
        attempt=launch.attempt,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        host=encodable(socket.gethostname()),
        pid=os.getpid(),
        started_s=time.time(),
        start_step=settings.start_step,
        environment=describe(),
    )


def describe() -> dict[str, str]:
    """Versions and hardware as texts. Does not import torch, and does not start CUDA where it is not started."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gradiometer": __version__,
        "cpus": str(os.cpu_count() or 0),
        "command": command_line(sys.argv),
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["device"] = str(torch.cuda.get_device_name())
    # An argument or a host may hold bytes that are no text.
    return {name: encodable(text) for name, text in found.items()}


def command_line(arguments: list[str]) -> str:
    """The command as one text; what follows or belongs to an option with a secret's name is hidden."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = bool(_SECRET.search(name)) and (argument.startswith("-") or bool(equals))
        if hide_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif secret and equals:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(argument)
        hide_next = secret and not equals
    return " ".join(shown)[:_MAX_COMMAND_CHARS]
