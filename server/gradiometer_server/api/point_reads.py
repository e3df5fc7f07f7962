"""Exact points for export and for followers, as JSON, CSV or Arrow. Every method blocks; call it in a thread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from starlette.responses import Response, StreamingResponse

from gradiometer_server.api import arrow
from gradiometer_server.api.answers import answer
from gradiometer_server.api.reads import Reads
from gradiometer_server.api.schemas import MAX_STEP
from gradiometer_server.api.series_schemas import TailQuery, TailRef
from gradiometer_server.api.views import Json
from gradiometer_server.domain.jsonable import floats_to_json
from gradiometer_server.errors import GradiometerError, InvalidRequest, NotFound, StoreUnavailable
from gradiometer_server.store.lines import LineRef
from gradiometer_server.store.points import Cursor, Page

ExportForm = Literal["json", "csv", "arrow"]
_JSON_LIMIT: Final = 10_000
_STREAM_LIMIT: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Which points are wanted. `limit` None: as many as the form gives by itself; `cursor`: of the page before."""

    run: str
    metric: str
    rank: int | None
    attempt: int | None
    first: int | None
    last: int | None
    limit: int | None
    cursor: str | None


class PointReads:
    """Answers with points. Thread-safe."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def export(self, asked: Export, form: ExportForm) -> Response:
        """A page, or with CSV and Arrow everything if no limit was given.

        Raises:
            NotFound: the run or the metric.
            InvalidRequest: a range that ends before it begins, a foreign cursor, or a layer statistic.
            Conflict: raw points of that range were dropped to save space.
        """
        if asked.first is not None and asked.last is not None and asked.first > asked.last:
            raise InvalidRequest(
                f"the range begins at step {asked.first} but ends at {asked.last}.",
                field="query.from",
                remedy="Give a first step that is not beyond the last one.",
            )
        pages = self._pages(asked, form)
        first = next(pages)
        follows = _cursor_after(first)
        headers = {"X-Total-Count": str(first.total)}
        if asked.limit is not None and follows is not None:
            headers["X-Next-Cursor"] = follows
        every = itertools.chain([first], pages) if asked.limit is None else iter([first])
        if form == "csv":
            return StreamingResponse(
                _csv(every), media_type="text/csv; charset=utf-8", headers={**arrow.HEADERS, **headers}
            )
        head = {"run": asked.run, "metric": asked.metric, "rank": asked.rank, "total": first.total}
        if form == "arrow":
            return arrow.streaming(head, map(_arrow_columns, every), _arrow_columns(_NO_POINTS), headers)
        return answer({**head, "points": _points_view(first), "next_cursor": follows})

    def _pages(self, asked: Export, form: ExportForm) -> Iterator[Page]:
        ref = LineRef(
            run_key=self._reads.key(asked.run), key=asked.metric, rank=asked.rank, attempt=asked.attempt
        )
        limit = asked.limit or (_JSON_LIMIT if form == "json" else _STREAM_LIMIT)
        first = 0 if asked.first is None else asked.first
        last = MAX_STEP if asked.last is None else asked.last
        begin = _read_cursor(asked.cursor)
        while True:
            page = self._reads.points.page(ref, first=first, last=last, begin=begin, limit=limit)
            yield page
            if not page.more or not len(page.steps_N):
                return
            begin = int(page.steps_N[-1]) + 1

    def tail(self, query: TailQuery) -> Json:
        """What is new of each series; what is wrong with one of them is its `error`."""
        keys = self._reads.keys({ref.run for ref in query.series})
        return {"series": [self._news(ref, keys.get(ref.run), query.limit) for ref in query.series]}

    def _news(self, ref: TailRef, key: int | None, limit: int) -> Json:
        head: Json = {"run": ref.run, "metric": ref.metric, "rank": ref.rank}
        try:
            if key is None:
                raise NotFound("run", ref.run)
            cursor = None if ref.cursor is None else Cursor.read(ref.cursor)
            line = LineRef(run_key=key, key=ref.metric, rank=ref.rank)
            news = self._reads.points.news(line, cursor, limit)
        except StoreUnavailable:
            raise
        except GradiometerError as error:
            nothing: Json = {
                "points": {"step": [], "value": []},
                "cursor": ref.cursor,
                "more": False,
                "reset": False,
            }
            return {**head, **nothing, "error": str(error)}
        return {
            **head,
            "points": {"step": news.steps_N.tolist(), "value": floats_to_json(news.values_N)},
            "cursor": None if news.cursor is None else str(news.cursor),
            "more": news.more,
            "reset": news.reset,
        }


def _read_cursor(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and int(cursor) <= MAX_STEP):
        raise InvalidRequest(
            f"the cursor {cursor[:50]!r} was not given out by this server.",
            field="query.cursor",
            remedy="Ask for the first page without a cursor.",
        )
    return int(cursor)


def _cursor_after(page: Page) -> str | None:
    return str(int(page.steps_N[-1]) + 1) if page.more and len(page.steps_N) else None


def _points_view(page: Page) -> Json:
    return {
        "step": page.steps_N.tolist(),
        "value": floats_to_json(page.values_N),
        "time_s": floats_to_json(page.times_N, nan_is_null=True),
    }


def _csv(pages: Iterator[Page]) -> Iterator[bytes]:
    """Lines of step, value, time; a value that is not finite is NaN, Infinity or -Infinity; an unknown time is empty."""
    yield b"step,value,time_s\r\n"
    for page in pages:
        values, times = floats_to_json(page.values_N), floats_to_json(page.times_N, nan_is_null=True)
        rows = zip(page.steps_N.tolist(), values, times, strict=True)
        text = "".join(f"{step},{_text(value)},{_text(time_s)}\r\n" for step, value, time_s in rows)
        yield text.encode()


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _arrow_columns(page: Page) -> arrow.Columns:
    return {
        "step": arrow.wholes(page.steps_N),
        "value": arrow.reals(page.values_N),
        "time_s": arrow.reals(page.times_N, nan_is_null=True),
    }


_NO_POINTS: Final = Page(
    steps_N=np.empty(0, np.int64), values_N=np.empty(0), times_N=np.empty(0), total=0, more=False
)
