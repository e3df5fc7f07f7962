"""Where a test's own processes import from: this checkout, whatever else is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PYTHONPATH: Final = os.pathsep.join(map(str, (ROOT, ROOT / "trainer_agent", ROOT / "server")))
