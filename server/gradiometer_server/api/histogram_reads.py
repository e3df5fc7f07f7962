"""What REST reads of histograms: of which steps there are any, and the layers of one step. Blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradiometer_server.api.reads import Reads
from gradiometer_server.api.views import Json
from gradiometer_server.domain.histograms import EDGES, LayerHistogram, merged
from gradiometer_server.errors import NotFound
from gradiometer_server.store.details import DetailPart, list_histograms, read_histograms


class HistogramReads:
    """Reads of histograms in public form. Thread-safe."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def overview(self, run_id: str, limit: int) -> Json:
        """The newest steps of which there are histograms. Raises `NotFound` (the run)."""
        key = self._reads.key(run_id)
        with self._reads.database.read() as conn:
            by_step = _by_step(list_histograms(conn, key))
        newest = sorted(by_step, reverse=True)[:limit]
        return {"histograms": [_step_view(*place, by_step[place]) for place in newest]}

    def layers(self, run_id: str, step: int | None, layer: str | None, rank: int | None) -> Json:
        """Histograms of one step (None: the newest), of the newest attempt that sent any of it.

        Args:
            layer: only this one.
            rank: only this rank's own shards; None: merged over ranks.

        Raises:
            NotFound: no such run, step, layer or rank.
        """
        key = self._reads.key(run_id)
        with self._reads.database.read() as conn:
            by_step = _by_step(list_histograms(conn, key))
            places = [place for place in by_step if step is None or place[1] == step]
            if not places:
                at = "" if step is None else f" at step {step}"
                raise NotFound("histograms", f"{run_id}{at}", remedy=f"See /api/v1/runs/{run_id}/histograms.")
            place = max(places)
            parts = [part for part in by_step[place] if rank is None or part.rank == rank]
            if not parts:
                raise NotFound("histograms", f"of rank {rank} at step {place[1]}")
            found = merged(read_histograms(conn, key, parts, place[1]))
        wanted = [one for one in found if layer is None or one.name == layer]
        if layer is not None and not wanted:
            raise NotFound("layer", layer)
        return {
            **_step_view(*place, parts),
            "rank": rank,
            "edges": list(EDGES),
            "layers": [_layer_view(one) for one in wanted],
        }


def _by_step(rows: Sequence[tuple[DetailPart, Any]]) -> dict[tuple[int, int], list[DetailPart]]:
    """Records by attempt and step."""
    found: dict[tuple[int, int], list[DetailPart]] = {}
    for part, steps_N in rows:
        for step in steps_N.tolist():
            found.setdefault((part.attempt, step), []).append(part)
    return found


def _step_view(attempt: int, step: int, parts: Sequence[DetailPart]) -> Json:
    return {
        "attempt": attempt,
        "step": step,
        "ranks": sorted({part.rank for part in parts}),
        "reasons": list(dict.fromkeys(part.reason for part in parts)),
        "trigger_steps": sorted({part.trigger_step for part in parts if part.trigger_step is not None}),
    }


def _layer_view(one: LayerHistogram) -> Json:
    return {
        "name": one.name,
        "numel": one.numel,
        "counted": int(one.counts_B.sum()),
        "counts": one.counts_B.tolist(),
    }
