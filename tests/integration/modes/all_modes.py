"""All modes in the order of docs/modes.md: one list per module."""

from __future__ import annotations

from tests.integration.modes import (
    compiled_modes,
    ddp_modes,
    four_rank_modes,
    fsdp_modes,
    one_process_modes,
    parallel_modes,
)

MODULES = (
    one_process_modes,
    compiled_modes,
    ddp_modes,
    fsdp_modes,
    parallel_modes,
    four_rank_modes,
)
ALL_MODES = [mode for module in MODULES for mode in module.MODES]
