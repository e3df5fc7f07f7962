"""Reads the gradient scaler's two metrics, shared by the rules that judge overflows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

SCALE: Final = "scaler/scale"
SKIPPED: Final = "scaler/skipped"


def skipped_step(values: Mapping[str, float], previous_scale: float | None) -> bool | None:
    """Whether the scaler skipped this step; None if `values` say nothing about it.

    Merged over ranks `scaler/skipped` is a mean, so any positive value counts. A run that reports only the scale
    tells of a skip by a fall of it, because GradScaler lowers the scale in no other case.
    """
    if SKIPPED in values:
        return values[SKIPPED] > 0
    scale = values.get(SCALE)
    if scale is None or previous_scale is None or not math.isfinite(scale):
        return None
    return scale < previous_scale
