"""The training process: plays the named modes of one module one after another.

`python -m tests.integration.modes.mode_program MODULE FOLDER NAME...`; RANK and WORLD_SIZE as torchrun sets them. With
more than one rank there is one gloo process group for all modes. A mode that fails leaves `<slug>.rank<k>.error`; with
several ranks the process then ends, because the others may hang in a collective.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integration.modes.mode_framework import play


def main() -> int:
    module, folder, *names = sys.argv[1:]
    # torch's own warnings, about its internals.
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    modes = {mode.name: mode for mode in importlib.import_module(module).MODES}
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    for name in names:
        assert modes[name].world_size == world_size
        try:
            play(modes[name], Path(folder), rank=rank)
        except Exception:  # noqa: BLE001  the test shows it, whatever it is
            (Path(folder) / f"{modes[name].slug}.rank{rank}.error").write_text(traceback.format_exc())
            if world_size > 1:
                os._exit(1)
        if world_size > 1:
            dist.barrier()
    if world_size > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
