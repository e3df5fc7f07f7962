"""`python -m gradiometer_server`."""

from __future__ import annotations

import sys

from gradiometer_server.cli import main

sys.exit(main())
