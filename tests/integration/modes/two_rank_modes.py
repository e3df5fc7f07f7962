"""All modes of two ranks, to be played in one set of processes."""

from __future__ import annotations

from tests.integration.modes import ddp_modes, fsdp_modes, parallel_modes

TABLE = [*ddp_modes.MODES, *fsdp_modes.MODES, *parallel_modes.MODES]
MISTAKES = [parallel_modes.UNTOLD_EXPERTS, parallel_modes.SAME_NAMES]
MODES = [*TABLE, *MISTAKES, parallel_modes.OWN_NAMES]
