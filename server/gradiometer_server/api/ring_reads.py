"""What REST reads of the rings: which ranks shipped which steps, and one rank's layers over them. Blocks.

Shape letters: N steps, L layers, K statistics of a schema, P partial statistics in wire order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gradiometer.wire import STATISTICS
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.views import Json
from gradiometer_server.domain.absent import ABSENT, is_absent
from gradiometer_server.domain.jsonable import floats_to_json
from gradiometer_server.errors import InvalidRequest, NotFound
from gradiometer_server.fold.derive import Measured, derive_layers
from gradiometer_server.store.details import DetailPart, RingSteps, list_parts, read_steps

_MAX_STEP: Final = 2**53 - 1


class RingReads:
    """Reads of rings in public form. Thread-safe."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def overview(self, run_id: str) -> Json:
        """Ranks that shipped their ring, newest attempt first. Raises `NotFound` (the run)."""
        key = self._reads.key(run_id)
        with self._reads.database.read() as conn:
            parts = list_parts(conn, key)
        ranks = groupby(parts, lambda part: (part.attempt, part.rank))
        views = [_rank_view(attempt, rank, list(own)) for (attempt, rank), own in ranks]
        return {"ranks": sorted(views, key=lambda view: (-view["attempt"], view["rank"]))}

    def layers(
        self, run_id: str, rank: int, statistic: str, first: int | None, last: int | None, columns: int
    ) -> Json:
        """Layers x steps of one statistic of one rank, of the newest attempt in which it shipped its ring.

        Of more steps than `columns` the last ones.

        Raises:
            NotFound: no such run, or that rank shipped nothing.
            InvalidRequest: the range ends before it begins.
        """
        low, high = 0 if first is None else first, _MAX_STEP if last is None else last
        if low > high:
            raise InvalidRequest(f"the range begins at step {low} but ends at {high}.", field="from")
        key = self._reads.key(run_id)
        with self._reads.database.read() as conn:
            own = [part for part in list_parts(conn, key) if part.rank == rank]
            if not own:
                raise NotFound("ring", f"of rank {rank}")
            own = [part for part in own if part.attempt == own[-1].attempt]
            steps = read_steps(conn, key, [part for part in own if part.step0 <= high and part.step1 >= low])
        extent = (min(part.step0 for part in own), max(part.step1 for part in own))
        return _map_view(statistic, steps, low, high, columns, extent)


def _rank_view(attempt: int, rank: int, parts: Sequence[DetailPart]) -> Json:
    by_reason = groupby(parts, lambda part: (part.trigger_step, part.reason))
    return {
        "attempt": attempt,
        "rank": rank,
        "first_step": min(part.step0 for part in parts),
        "last_step": max(part.step1 for part in parts),
        "parts": [
            {"trigger_step": step, "reason": reason, **_extent(list(own))}
            for (step, reason), own in by_reason
        ],
    }


def _extent(parts: Sequence[DetailPart]) -> Json:
    return {
        "first_step": min(part.step0 for part in parts),
        "last_step": max(part.step1 for part in parts),
        "num_steps": sum(part.n for part in parts),
    }


def _map_view(
    statistic: str, found: Sequence[RingSteps], low: int, high: int, columns: int, extent: tuple[int, int]
) -> Json:
    names = list(dict.fromkeys(layer.name for one in found for layer in one.schema.layers))
    place = {name: index for index, name in enumerate(names)}
    every = {int(step) for one in found for step in one.steps_N if low <= step <= high}
    steps = sorted(every)[-columns:]
    column = {step: index for index, step in enumerate(steps)}
    values_LN = np.full((len(names), len(steps)), ABSENT)
    for one in found:
        rows = [place[layer.name] for layer in one.schema.layers]
        kept = [index for index, step in enumerate(one.steps_N.tolist()) if step in column]
        if kept:
            columns_N = [column[int(one.steps_N[index])] for index in kept]
            values_LN[np.ix_(rows, columns_N)] = _derived(one, statistic, kept).T
    bad_LN = ~np.isfinite(values_LN) & ~is_absent(values_LN)
    return {
        "statistic": statistic,
        "layers": names,
        "bucket_width": 1,
        "steps": steps,
        "values": floats_to_json(np.where(bad_LN, ABSENT, values_LN)),
        "nonfinite": [[int(layer), int(step), 1] for layer, step in np.argwhere(bad_LN)],
        "first_step": extent[0],
        "last_step": extent[1],
    }


def _derived(one: RingSteps, statistic: str, kept: Sequence[int]) -> NDArray[np.float64]:
    """One statistic of the steps at `kept`: (N, L); `ABSENT` where the rank did not measure what it needs."""
    measured = tuple(STATISTICS.index(name) for name in one.schema.statistics)
    shape = (len(kept), len(one.schema.layers))
    partials_NLP = np.zeros((*shape, len(STATISTICS)))
    partials_NLP[..., measured] = one.values_NW[list(kept)].reshape(*shape, len(measured))
    rows = derive_layers(partials_NLP.reshape(-1, len(STATISTICS)), Measured(by_some=frozenset(measured)))
    found = rows.get(statistic)
    return np.full(shape, ABSENT) if found is None else found.reshape(shape)
