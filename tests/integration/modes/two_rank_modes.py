"""All modes of two ranks, to be played in one set of processes."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integration.modes import ddp_modes, fsdp_modes, parallel_modes
from tests.integration.modes.mode_framework import Mode
from tests.integration.modes.mode_net import make_net

TABLE = [*ddp_modes.MODES, *fsdp_modes.MODES, *parallel_modes.MODES]
MISTAKES = [parallel_modes.UNTOLD_EXPERTS, parallel_modes.SAME_NAMES]


class Collectives(TorchDispatchMode):
    """Counts the operations of torch.distributed, in eager calls and inside DTensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            # Lets it be taken apart first, so that what it is made of comes here.
            return NotImplemented
        self.count += "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def counted(train):
    """Notes how many collectives the loop ran, the gathering of the reference's weights included."""

    def wrapped(session):
        with Collectives() as collectives:
            result = train(session)
        session.notes["collectives"] = collectives.count
        return result

    return wrapped


COUNTED = [
    Mode(
        name="collectives of FSDP2",
        train=counted(lambda s: fsdp_modes.fsdp2(s, make_net(), clip=True)),
        reads="",
        world_size=2,
    ),
    Mode(
        name="collectives of tensor and sequence parallelism",
        train=counted(lambda s: parallel_modes.tensor_parallel(s, parallel_modes.SEQUENCE_PLAN)),
        reads="",
        ranks=1,
        world_size=2,
    ),
]
MODES = [*TABLE, *MISTAKES, parallel_modes.OWN_NAMES, *COUNTED]
