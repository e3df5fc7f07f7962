"""Names of modules and parameters as the user's own code has them, whatever wrappers put into them.

DDP, FSDP1, `torch.compile` and activation checkpointing hold the wrapped module as a child of their own and so add a
part to every name; the same model must have the same layer names in all of them.
"""

from __future__ import annotations

from typing import Final

import torch

_TRANSPARENT: Final = frozenset(("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"))
_REPLICATING: Final = frozenset(("DistributedDataParallel", "DataParallel", "DeepSpeedEngine"))


class PlainNames:
    """Takes out of a name what the wrappers in `model` put into it.

    Args:
        model: as it is watched; wrappers may sit anywhere in it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # "module" is taken out only where a wrapper put it: a user's own submodule may have that name.
        self._added = {
            f"{path}.module" if path else "module"
            for path, module in model.named_modules()
            if type(module).__name__ in _REPLICATING
        }

    def of(self, name: str) -> str:
        """The plain name of a module or parameter of `model`; empty for the model itself."""
        path, kept = "", []
        for part in name.split("."):
            path = f"{path}.{part}" if path else part
            if part not in _TRANSPARENT and path not in self._added:
                kept.append(part)
        return ".".join(kept)
