"""All modes of one process, to be played in one process."""

from __future__ import annotations

from tests.integration.modes import loop_modes, model_modes, optimizer_modes

MODES = [*loop_modes.MODES, *optimizer_modes.MODES, *model_modes.MODES]
