"""What all ranks must decide alike: one small all-reduce per question, on a group of its own.

Unconditional by design: every rank asks the same questions in the same order, whatever it thinks of them, so that no
collective ever waits for a rank that does not come. Should one not come after all, the wait ends and raises.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch

TIMEOUT_S: Final = 120.0
_RANKS: Final = 2**31


class Agreement:
    """All ranks of the default process group; a process without one agrees with itself. Made by all ranks together.

    Attributes:
        rank, world_size: in the default process group.
        group: of the gloo backend, so that no accelerator is waited for; None for a world of one.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.group: Any = None
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self.group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=TIMEOUT_S), group_desc="gradiometer flight recorder"
            )

    def largest(self, code: int, step: int) -> tuple[int, int, bool]:
        """The largest code of all ranks, the lowest rank that has it, and whether all ranks are at the same step.

        Args:
            code: from 0 to 2**31.
        """
        if self.group is None:
            return code, self.rank, True
        mine = code * _RANKS + (_RANKS - 1 - self.rank)
        values = torch.tensor([mine, step, -step], dtype=torch.int64)
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self.group)
        found, highest, lowest = values.tolist()
        return found // _RANKS, _RANKS - 1 - found % _RANKS, highest == -lowest

    def all_are(self, fine: bool) -> bool:
        """Whether every rank is fine; also a barrier."""
        if self.group is None:
            return fine
        value = torch.tensor([0 if fine else 1])
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=self.group)
        return not value.item()
