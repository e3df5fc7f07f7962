"""`ABSENT`: the value of a layer statistic that was not there, as distinct from one that was NaN.

A parameter without a gradient in a step has no norm; writing 0 or NaN would be a lie. The store keeps arrays of
floats bit for bit, so absence is one quiet NaN with a payload of its own. It survives a float32 <-> float64 cast.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_BITS_F4: Final = 0x7FC00AB5

ABSENT_F4: Final = np.uint32(_BITS_F4).view(np.float32)
ABSENT: Final = np.float64(ABSENT_F4)


def is_absent(values: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Where `values` (float32 or float64, any shape) hold the absence mark."""
    whole = np.ascontiguousarray(values)
    if values.dtype == np.float32:
        return np.equal(whole.view(np.uint32), _BITS_F4)
    return np.equal(whole.view(np.uint64), ABSENT.view(np.uint64))
