"""The newest stored points of a scalar series: what a fold has to know again after a restart."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, bindparam, select

from gradiometer_server.domain.series import Series
from gradiometer_server.store.tables import chunk
from gradiometer_server.summaries import codec

_MOST_CHUNKS: Final = 8
_NEWEST = (
    select(chunk.c.step0, chunk.c.step1, chunk.c.n, chunk.c.stride, chunk.c.steps, chunk.c.data)
    .where(chunk.c.run_id == bindparam("of_run"), chunk.c.series_id == bindparam("of_series"))
    .order_by(chunk.c.step0.desc())
    .limit(_MOST_CHUNKS)
)


def last_points(conn: Connection, series: Series, count: int) -> dict[int, float]:
    """Value by step of the last `count` points of a series of width 1, or of its last 8 chunks if those hold fewer.

    Raises:
        CorruptData: one of the chunks is damaged.
    """
    points: dict[int, float] = {}
    for row in conn.execute(_NEWEST, {"of_run": series.run_key, "of_series": series.series_id}).all():
        steps_N = codec.decode_steps(row.step0, row.stride, row.n, row.steps, last=row.step1)[::-1]
        values_N = codec.decode_values(row.data, row.n, 1)[::-1, 0]
        points.update(zip(steps_N[: count - len(points)].tolist(), values_N.tolist(), strict=False))
        if len(points) >= count:
            break
    return points
