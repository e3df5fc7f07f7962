"""What the server makes of the spools of all ranks of a mode: the fold itself, without network and database."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gradiometer import wire
from gradiometer.capture.statistics import NUM_NONFINITE, SUM_SQUARES
from gradiometer.spool_reader import SpoolReader
from gradiometer_server.alerting.engine import AlertEngine
from gradiometer_server.domain.absent import is_absent
from gradiometer_server.domain.alerts import Episode
from gradiometer_server.domain.folded import Folded, FoldedLayers, FoldedScalars, Layout
from gradiometer_server.fold.run_fold import SILENCE_S, FoldSource, RunFold
from tests.integration.modes.mode_checks import Played, relative_error


@dataclass
class Shown:
    """By step: the layers, the merged scalars, and those of each rank."""

    layers: dict[int, FoldedLayers] = field(default_factory=dict)
    values: dict[int, dict[str, float]] = field(default_factory=dict)
    by_rank: dict[int, dict[str, dict[int, float]]] = field(default_factory=dict)
    episodes: dict[str, Episode] = field(default_factory=dict)

    def norm_of(self, step: int, name: str) -> float | None:
        item = self.layers[step]
        value = item.statistics["norm"][[item.layout.names.index(name)]]
        return None if is_absent(value)[0] else float(value[0])

    def add(self, items: list[Folded], engine: AlertEngine) -> None:
        for item in items:
            for episode in engine.observe(item):
                self.episodes[episode.alert_id] = episode
            if isinstance(item, FoldedLayers):
                self.layers[item.step] = item
            elif isinstance(item, FoldedScalars):
                self.values.setdefault(item.step, {}).update(item.values)
                for name, ranks in item.by_rank.items():
                    self.by_rank.setdefault(item.step, {})[name] = dict(ranks)


def shown(result: Played, *, silent: Collection[int] = (), stopped: Collection[int] = ()) -> Shown:
    """Folds the records of all ranks, rank after rank.

    Args:
        silent: ranks of which the server never heard.
        stopped: ranks that said what they hold, and no more.
    """
    fold = RunFold(make_layout=lambda names, numels: Layout(layout_id=1, names=names, numels=numels))
    out, engine = Shown(), AlertEngine.restore([], [])
    world_size = result.mode.world_size
    heard = [rank for rank in range(world_size) if rank not in silent]
    for rank in heard:
        fold.add_source(FoldSource(source_id=rank, ordinal=1, rank=rank, world_size=world_size), 0.0)
    for rank in heard:
        reader = SpoolReader(Path(result.said[rank]["directory"]))
        for seq, data in reader.records():
            record = wire.decode_record(data)
            if rank not in stopped or isinstance(record, (wire.LayerSchema, wire.ScalarSchema)):
                out.add(fold.apply(rank, seq, record, 0.0), engine)
        reader.close()
    out.add(fold.tick(SILENCE_S + 1.0), engine)
    return out


def check_server(result: Played) -> Shown:
    """The server shows the norms of the plain model, whole, and has nothing to complain about."""
    out = shown(result)
    assert out.episodes == {}, [one.first.facts for one in out.episodes.values()]
    for step, rows in result.expected.items():
        item = out.layers[step]
        assert (item.coverage, item.mismatch, item.seen) == (1.0, None, item.expected)
        for name, row in rows.items():
            norm = out.norm_of(step, name)
            if row is None or norm is None:
                assert (row, norm) == (None, None), name
                continue
            assert relative_error(norm, math.sqrt(row[SUM_SQUARES])) <= result.mode.tolerance, name
        present = [row for row in rows.values() if row is not None]
        norm = math.sqrt(sum(row[SUM_SQUARES] for row in present))
        assert out.values[step]["grad/norm"] == pytest.approx(norm, rel=result.mode.tolerance, nan_ok=True)
        assert out.values[step]["grad/num_nonfinite"] == sum(row[NUM_NONFINITE] for row in present)
        assert out.values[step]["grad/coverage_fraction"] == 1.0
    return out
