"""This rank's place in the process groups that a user names in `watch(..., sharded=...)`. No collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def places(sharded: Mapping[str, Any], mistaken: Callable[[str], None]) -> dict[str, tuple[int, int]]:
    """By pattern of parameter names, (rank, size) in its group; what is not a group is told and left out.

    Args:
        sharded: pattern -> `torch.distributed.ProcessGroup` or one-dimensional `DeviceMesh` that has this rank.
        mistaken: told what is wrong.
    """
    found = {}
    for pattern, group in sharded.items():
        place = _place(group)
        if place is None:
            mistaken(
                f"sharded[{pattern!r}] is a {type(group).__name__}, not a process group or one-dimensional device mesh "
                "of which this rank is a member"
            )
        else:
            found[pattern] = place
    return found


def _place(group: Any) -> tuple[int, int] | None:
    try:
        if hasattr(group, "get_group"):
            group = group.get_group()
        rank, size = int(group.rank()), int(group.size())
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return (rank, size) if 0 <= rank < size else None
