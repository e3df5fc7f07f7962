"""What a rank says again of a step replaces what it said, in the merged value too, until the ranks speak of a later one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradiometer import wire
from gradiometer_server.domain.folded import FoldedScalars, Layout
from gradiometer_server.fold.run_fold import SILENCE_S, FoldSource, RunFold

LOSS = "train/loss"


class Two:
    """Two ranks that report a loss and a layer; `loss`: merged values as a store would hold them."""

    def __init__(self) -> None:
        self.fold = RunFold(make_layout=lambda names, numels: Layout(layout_id=1, names=names, numels=numels))
        self.loss: dict[int, float] = {}
        self._seqs = [0, 0]
        for rank in range(2):
            self.fold.add_source(FoldSource(source_id=rank, ordinal=1, rank=rank, world_size=2), 0.0)
            self._say(rank, wire.ScalarSchema(schema_id=1, columns=(wire.Column(LOSS),)))
            layer = wire.Layer("w", (4,), 4)
            self._say(rank, wire.LayerSchema(schema_id=2, layers=(layer,), statistics=wire.NORM_STATISTICS))

    def _say(self, rank: int, record: wire.Record) -> None:
        self._seqs[rank] += 1
        self._keep(self.fold.apply(rank, self._seqs[rank], record, 0.0))

    def _keep(self, items: Sequence[object]) -> None:
        for item in items:
            if isinstance(item, FoldedScalars) and LOSS in item.values:
                self.loss[item.step] = item.values[LOSS]

    def report(self, rank: int, steps: Sequence[int], value: float | None = None) -> None:
        """The loss of these steps, or without a value their layers."""
        row = [4.0, 1.0, 0.0] if value is None else [value]
        self._say(
            rank,
            wire.Frame(
                schema_id=2 if value is None else 1,
                steps=tuple(steps),
                times=tuple(map(float, steps)),
                values=np.array(row * len(steps), "<f8").tobytes(),
            ),
        )

    def tick(self, now_s: float) -> None:
        self._keep(self.fold.tick(now_s))


def test_the_last_word_of_each_rank_is_merged() -> None:
    two = Two()
    two.report(0, [5], 1.0)
    two.report(1, [5], 3.0)
    assert two.loss == {5: 2.0}, "shown as soon as all have spoken"
    two.report(0, [5, 5], 7.0)
    two.report(1, [5], 9.0)
    assert two.loss == {5: 8.0}
    assert two.fold.num_late == 0


def test_layers_that_run_ahead_of_their_scalars_do_not_end_a_step() -> None:
    two = Two()
    for rank in range(2):
        two.report(rank, [5, 6, 7])
    two.report(0, [5], 1.0)
    two.report(1, [5], 3.0)
    two.tick(1.0)
    two.report(0, [5], 7.0)
    assert two.loss == {5: 5.0}
    assert two.fold.num_late == 0


def test_a_step_is_kept_until_the_ranks_go_on_or_fall_silent() -> None:
    two = Two()
    for step in (5, 6):
        for rank in range(2):
            two.report(rank, [step], 1.0)
    assert two.fold.offsets() == {0: 3, 1: 3}, "step 6 is read again by a server that starts again"
    two.tick(SILENCE_S + 1.0)
    assert two.fold.offsets() == {0: 4, 1: 4}
