"""`python -m gradiometer` is the command `gradiometer`."""

from __future__ import annotations

import sys

from gradiometer.cli import main

if __name__ == "__main__":
    sys.exit(main())
