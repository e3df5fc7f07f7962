"""All modes of one process, to be played in one process."""

from __future__ import annotations

import dataclasses

from tests.integration.modes import loop_modes, model_modes, optimizer_modes

TIERS = ({"statistics": "norm"}, {"every": 2})
MODES = [
    dataclasses.replace(mode, tiers=TIERS)
    for mode in (*loop_modes.MODES, *optimizer_modes.MODES, *model_modes.MODES)
]
