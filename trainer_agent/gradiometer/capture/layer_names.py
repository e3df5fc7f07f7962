"""Names of the layers of a run with several watches: valid, each given once, and what is to be told about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from gradiometer import wire

if TYPE_CHECKING:
    from gradiometer.capture.layout import Layout

_SHOWN_CHARS: Final = 60


def of_layers(names: Sequence[str], prefix: str, others: Sequence[Layout], notes: list[str]) -> list[str]:
    """What the layers of one watch are called on the wire, in their order.

    Args:
        names: of its parameters.
        prefix: what its name puts before them; replaced by `name#2.`, ... where another watch has one of these names.
        others: the layouts of the other watches.
        notes: what to tell the user; added to.
    """
    taken = {layer.name for other in others for layer in other.layers}
    found, renamed = _fitting(names, prefix)
    if not taken.isdisjoint(found):
        clash, number = next(name for name in found if name in taken), 1
        while not taken.isdisjoint(found):
            number += 1
            changed = f"{prefix.removesuffix('.')}#{number}."
            found, renamed = _fitting(names, changed)
        notes.append(
            f"another watch has a layer {_shown(clash)} too, so the layers of this one are called {changed}*; "
            "give watch() another name"
        )
    if renamed:
        name, shown_as = renamed[0]
        problem = wire.name_problem(name) or "another parameter is called this"
        notes.append(
            f"the names of {len(renamed)} parameters cannot be kept, e.g. {_shown(name)} ({problem}), "
            f"which is shown as {_shown(shown_as)}"
        )
    return found


def shared_with(
    parameters: Sequence[torch.Tensor],
    spans: Sequence[slice | None],
    names: Sequence[str],
    others: Sequence[Layout],
    notes: list[str],
) -> list[str]:
    """Which layer of another watch each of these is too; "": none. Each watch reports what it saw of a parameter."""
    theirs = {
        _place(parameter, span): layer.name
        for other in others
        for layer, parameter, span in zip(other.layers, other.parameters, other.spans, strict=True)
    }
    found = [theirs.get(_place(one, span), "") for one, span in zip(parameters, spans, strict=True)]
    shared = [(name, also) for name, also in zip(names, found, strict=True) if also]
    if shared:
        name, also = shared[0]
        notes.append(
            f"{len(shared)} parameters are in two watches, e.g. {_shown(also)}, which is {_shown(name)} too: "
            "each watch shows its own reading, and in a step in which both report, grad/norm counts the first one alone"
        )
    return found


def _place(parameter: torch.Tensor, span: slice | None) -> tuple[int, int]:
    """A flat parameter holds several layers."""
    return id(parameter), -1 if span is None else span.start


def _fitting(names: Sequence[str], prefix: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Valid names, all different, and which had to be changed to what."""
    found: dict[str, None] = {}
    renamed = []
    for name in names:
        whole = prefix + name
        fitting = wire.fitting_name(whole, taken=found)
        found[fitting] = None
        if fitting != whole:
            renamed.append((whole, fitting))
    return list(found), renamed


def _shown(name: str) -> str:
    fitting = wire.fitting_name(name)
    return fitting if len(fitting) <= _SHOWN_CHARS else f"{fitting[:_SHOWN_CHARS]}…"
