"""Tails of all series of one run, and the rows that name these series.

One thread writes, any thread reads snapshots.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from gradiometer_server.domain.series import Series, Tail
from gradiometer_server.fold.points import Point, Points, SeriesName
from gradiometer_server.fold.tails import TailBuffer
from gradiometer_server.store.database import Database
from gradiometer_server.store.series import SeriesKey, ensure_series


class TailSet:
    """Newest points by series.

    Attributes:
        last_step: highest step of a merged scalar since this run was loaded.
        num_steps: points of the longest tail.
        num_bytes: bytes of all points.
    """

    def __init__(self, database: Database, run_key: int, known: Iterable[Series]) -> None:
        self._database, self._run_key = database, run_key
        self._ids = {_name_of(series): series.series_id for series in known}
        self._tails: dict[int, TailBuffer] = {}
        self._latest: dict[str, tuple[int, int, float]] = {}
        self.last_step: int | None = None
        self.num_steps = self.num_bytes = 0
        self._lock = threading.Lock()

    def ensure(self, names: Iterable[SeriesName]) -> bool:
        """Write the rows of series that are new; True if one is a metric (or a rank of it) not seen before.

        Raises:
            StoreUnavailable: nothing was written.
        """
        missing = [name for name in dict.fromkeys(names) if name not in self._ids]
        if not missing:
            return False
        with self._database.write() as conn:
            made: dict[SeriesName, int] = {}
            for attempt in sorted({name.attempt for name in missing}):
                keys = {name: _key_of(name) for name in missing if name.attempt == attempt}
                rows = ensure_series(conn, self._run_key, attempt, keys.values())
                made.update({name: rows[key].series_id for name, key in keys.items()})
        self._ids.update(made)
        return True

    def append(self, points: Iterable[Point | Points]) -> None:
        """Add points whose series are ensured. # Hot path: once per batch; one dictionary lookup a point."""
        for point in points:
            tail = self._tail(point.name)
            before = tail.num_bytes
            if isinstance(point, Points):
                tail.extend(point.steps_N, point.values_N[:, None])
                self._note_latest(point.name, int(point.steps_N[-1]), float(point.values_N[-1]))
            else:
                tail.append(point.step, point.values)
                if isinstance(point.values, float):
                    self._note_latest(point.name, point.step, point.values)
            # Counted along: to ask every tail after every batch would cost a run of many series more than its points.
            self.num_steps = max(self.num_steps, len(tail))
            self.num_bytes += tail.num_bytes - before

    def _tail(self, name: SeriesName) -> TailBuffer:
        series_id = self._ids[name]
        tail = self._tails.get(series_id)
        if tail is None:
            is_layer = name.layout_id is not None
            tail = TailBuffer(width=name.width, dtype=np.float32 if is_layer else np.float64)
            with self._lock:
                self._tails[series_id] = tail
        return tail

    def _note_latest(self, name: SeriesName, step: int, value: float) -> None:
        """A later attempt begins again at a lower step, and is the latest all the same."""
        if name.rank is not None:
            return
        if self.last_step is None or step > self.last_step:
            self.last_step = step
        known = self._latest.get(name.key)
        if known is None or (name.attempt, step) >= known[:2]:
            with self._lock:
                self._latest[name.key] = (name.attempt, step, value)

    def snapshot(self) -> Mapping[int, Tail]:
        """Tails by series id, as views that stay true while more is appended."""
        with self._lock:
            return {series_id: tail.view() for series_id, tail in self._tails.items()}

    def latest(self, names: Collection[str] | None = None) -> Mapping[str, tuple[int, float]]:
        """(step, value) of the highest step of every merged scalar, or of those, since this run was loaded."""
        with self._lock:
            if names is None:
                found = dict(self._latest)
            else:
                found = {name: self._latest[name] for name in names if name in self._latest}
        return {key: (step, value) for key, (_, step, value) in found.items() if not key.startswith("_")}

    def clear(self) -> None:
        """All points are in chunks now."""
        with self._lock:
            self._tails = {}
        self.num_steps = self.num_bytes = 0

    @property
    def num_series(self) -> int:
        """Series that have points here."""
        return len(self._tails)


def _name_of(series: Series) -> SeriesName:
    return SeriesName(series.attempt, series.key, series.rank, series.layout_id, series.width)


def _key_of(name: SeriesName) -> SeriesKey:
    kind = "scalar" if name.layout_id is None else "layer"
    return SeriesKey(key=name.key, rank=name.rank, kind=kind, width=name.width, layout_id=name.layout_id)  # type: ignore[arg-type]
