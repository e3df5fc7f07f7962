"""Tells a module that torch.compile has in its hands."""

from __future__ import annotations

import sys

import torch


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module` is what `torch.compile(model)` returned, or was compiled in place by `model.compile()`.

    Not told by an attribute `_orig_mod`: a module of the user's own may have one.
    """
    # Whoever compiled something has imported it; the import alone takes seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    wrapper = getattr(dynamo, "OptimizedModule", ())
    return isinstance(module, wrapper) or getattr(module, "_compiled_call_impl", None) is not None
