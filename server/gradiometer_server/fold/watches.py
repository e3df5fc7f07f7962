"""Which of a rank's layer schemas speak of the same parameters, so that one knows when a rank has said all of a step.

A rank follows several optimizers (watches), each with layers of its own, and may declare the layers of a watch several
times: with all statistics and with the cheap ones, or again when the optimizer got other parameters. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradiometer.wire import LayerSchema


class LayerWatches:
    """The watches of all ranks of an attempt. Two schemas of one rank belong together if they share a layer."""

    def __init__(self) -> None:
        self._watch_of: dict[tuple[int, int], int] = {}
        self._owner: dict[tuple[int, str], int] = {}
        self._of_rank: dict[int, set[int]] = {}
        self.num = 0

    def declare(self, rank: int, schema: LayerSchema) -> None:
        """Take in a schema; it joins the watch that it shares layers with, or is a new one."""
        names = [(rank, layer.name) for layer in schema.layers]
        watch = next((self._owner[name] for name in names if name in self._owner), None)
        if watch is None:
            watch = self.num
            self.num += 1
        for name in names:
            self._owner.setdefault(name, watch)
        self._watch_of[rank, schema.schema_id] = watch
        self._of_rank.setdefault(rank, set()).add(watch)

    def is_whole(self, rank: int, by_schema: Mapping[int, Any]) -> bool:
        """Whether every watch of `rank` is among these schemas of one step."""
        watches = self._of_rank.get(rank, ())
        if len(watches) <= 1:
            return True
        return len({self._watch_of[rank, schema_id] for schema_id in by_schema}) == len(watches)
