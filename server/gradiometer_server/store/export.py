"""Writes one run to a folder of text files that need no Gradiometer to be read: complete, bit for bit, streaming.

The folder gets its name only when everything is in it. Reading goes in short snapshots, so a server may run beside it;
what it has not folded yet is written as the agents sent it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from sqlalchemy import Connection, bindparam, select

from gradiometer import wire
from gradiometer_server import __version__
from gradiometer_server.domain.folded import Layout
from gradiometer_server.domain.series import Series
from gradiometer_server.errors import ConfigurationError, StoreUnavailable
from gradiometer_server.store import alerts, details, dumps, log, runs
from gradiometer_server.store.chunks import BLOCK_COLUMNS
from gradiometer_server.store.database import Database
from gradiometer_server.store.definitions import list_definitions
from gradiometer_server.store.export_format import (
    README,
    CsvTables,
    JsonTables,
    Tables,
    json_line,
    plain,
    record_of,
)
from gradiometer_server.store.series import list_layouts, list_series
from gradiometer_server.store.tables import chunk, detail
from gradiometer_server.summaries import buckets
from gradiometer_server.summaries.blocks import Block, decode_points
from gradiometer_server.summaries.codec import unpack

FORMAT_VERSION: Final = 1
_CHUNKS_A_READ: Final = 16
_LOG_BYTES_A_READ: Final = 4 * 1024 * 1024

_CHUNKS = (
    select(*BLOCK_COLUMNS)
    .where(
        chunk.c.run_id == bindparam("of_run"),
        chunk.c.series_id == bindparam("of_series"),
        chunk.c.step0 > bindparam("after"),
    )
    .order_by(chunk.c.step0)
    .limit(_CHUNKS_A_READ)
)
_DETAIL_SEQS = (
    select(detail.c.source_id, detail.c.seq)
    .where(detail.c.run_id == bindparam("of_run"))
    .order_by(detail.c.source_id, detail.c.seq)
)
_DETAIL = select(detail).where(
    detail.c.run_id == bindparam("of_run"),
    detail.c.source_id == bindparam("of_source"),
    detail.c.seq == bindparam("of_seq"),
)


def export_run(
    database: Database, run_id: str, path: Path, *, table: Literal["jsonl", "csv"], now_s: float
) -> dict[str, int]:
    """Write a run to the folder `path`; returns how much of what is in it.

    Raises:
        NotFound: no such run.
        ConfigurationError: the folder exists, or cannot be made.
        StoreUnavailable: the database does not answer, or the disk is full; nothing is left behind.
        CorruptData: a stored block is damaged; nothing is left behind.
    """
    if path.exists():
        raise ConfigurationError(f"{path} exists.", remedy="Name a folder that does not exist.")
    partial = path.with_name(path.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        counts = _Export(database, run_id, partial, now_s).write(table)
        partial.rename(path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StoreUnavailable(
            f"the export to {path} failed: {error}.",
            remedy="Check that its folder is writable and has space.",
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return counts


class _Export:
    """One run on its way to a folder."""

    def __init__(self, database: Database, run_id: str, folder: Path, now_s: float) -> None:
        self._database, self._folder, self._now_s = database, folder, now_s
        with database.read() as conn:
            self._run = runs.get_run(conn, run_id, now_s)
            self._sources = runs.list_sources(conn, self._run.run_key)
            self._layouts = {one.layout_id: one for one in list_layouts(conn, self._run.run_key)}
            self._definitions = list_definitions(conn, self._run.run_key)
        self.counts: dict[str, int] = {}

    def write(self, table: Literal["jsonl", "csv"]) -> dict[str, int]:
        """All files; what vouches for the others comes last."""
        (self._folder / "README.md").write_text(README, encoding="utf-8")
        self._write_run()
        # What is not folded is read first: it may show up in the points as well, but is never missing in both.
        self._write_lines("unfolded", self._unfolded())
        tables = CsvTables(self._folder) if table == "csv" else JsonTables(self._folder)
        with tables:
            self._write_series(tables)
        self._write_lines("alerts", self._alerts())
        self._write_lines("dumps", self._dumps())
        self._write_lines("details", self._details())
        manifest = {
            "format": FORMAT_VERSION, "made_by": f"gradiometer {__version__}", "made_s": self._now_s, "run": self._run.id,
            "complete": True, "counts": self.counts,
        }  # fmt: skip
        (self._folder / "manifest.json").write_text(json_line(manifest), encoding="utf-8")
        return self.counts

    def _write_run(self) -> None:
        run = self._run
        described = {
            "id": run.id, "project": run.project, "name": run.name, "state": run.state, "created_s": run.created_s,
            "updated_s": run.updated_s, "finished_s": run.finished_s, "attempts": run.attempts,
            "world_size": run.world_size, "tags": list(run.tags), "notes": run.notes, "group": run.group,
            "exit": run.exit, "config": run.config, "unavailable": run.unavailable,
            "rejected_records": run.rejected_records, "last_rejection": run.last_rejection,
            "dropped_reports": run.dropped_reports,
            "definitions": [plain(one) for one in self._definitions],
            "layouts": [plain(one) for one in self._layouts.values()],
            "sources": [
                {name: value for name, value in plain(one).items() if name != "run_key"} for one in self._sources
            ],
        }  # fmt: skip
        (self._folder / "run.json").write_text(json_line(described), encoding="utf-8")

    def _write_lines(self, name: str, lines: Iterator[Mapping[str, Any]]) -> None:
        """A file with a line for each; no file if there is none."""
        count = 0
        file: TextIO | None = None
        try:
            for line in lines:
                file = file or (self._folder / f"{name}.jsonl").open("w", encoding="utf-8")
                file.write(json_line(line))
                count += 1
        finally:
            if file is not None:
                file.close()
        self.counts[name] = count

    def _write_series(self, tables: Tables) -> None:
        with self._database.read() as conn:
            rows = [row.series for row in list_series(conn, self._run.run_key)]
        self.counts.update(series=len(rows), points=0, windows=0)
        for one in rows:
            layout = None if one.layout_id is None else self._layouts[one.layout_id]
            for block in self._blocks(one):
                self._write_block(tables, one, layout, block)

    def _blocks(self, one: Series) -> Iterator[Block]:
        after = -1
        while True:
            find = {"of_run": one.run_key, "of_series": one.series_id, "after": after}
            with self._database.read() as conn:
                found = [Block(**row._mapping) for row in conn.execute(_CHUNKS, find)]
            yield from found
            if len(found) < _CHUNKS_A_READ:
                return
            after = found[-1].step0

    def _write_block(self, tables: Tables, one: Series, layout: Layout | None, block: Block) -> None:
        if not block.is_thinned:
            steps, values = decode_points(block, one.width)
            tables.points(one, layout, steps, values)
            self.counts["points"] += len(steps)
            return
        windows = buckets.decode_summaries(
            [block.summary], width=block.summary_width, columns=one.width, narrow=block.dtype == "f4"
        )
        tables.windows(one, layout, windows)
        self.counts["windows"] += len(windows.first_step_B)

    def _alerts(self) -> Iterator[Mapping[str, Any]]:
        cursor: str | None = None
        while True:
            with self._database.read() as conn:
                page = alerts.list_episodes(conn, self._run.run_key, limit=alerts.MAX_PAGE, cursor=cursor)
            yield from (plain(row.episode) for row in page.episodes)
            cursor = page.next_cursor
            if cursor is None:
                return

    def _dumps(self) -> Iterator[Mapping[str, Any]]:
        with self._database.read() as conn:
            found = dumps.list_dumps(conn, self._run.run_key)
        yield from map(plain, found)

    def _details(self) -> Iterator[Mapping[str, Any]]:
        names = {source.source_id: source for source in self._sources}
        with self._database.read() as conn:
            places = conn.execute(_DETAIL_SEQS, {"of_run": self._run.run_key}).all()
            schemas = {key: self._layer_schemas(conn, key) for key in {row.source_id for row in places}}
        for place in places:
            find = {"of_run": self._run.run_key, "of_source": place.source_id, "of_seq": place.seq}
            with self._database.read() as conn:
                row = conn.execute(_DETAIL, find).one_or_none()
            if row is None:
                continue
            source, schema = names[place.source_id], schemas[place.source_id].get(row.schema_id)
            yield {
                "attempt": source.ordinal, "rank": source.rank, "kind": row.kind, "reason": row.reason,
                "trigger_step": row.trigger_step, "steps": unpack(row.steps, row.n), "times": unpack(row.times, row.n),
                "layers": None if schema is None else [layer.name for layer in schema.layers],
                "columns": details.columns_of(row.kind, schema), "values": details.values_of(row, schema),
            }  # fmt: skip

    def _layer_schemas(self, conn: Connection, source_id: int) -> dict[int, wire.LayerSchema]:
        decoded = (
            wire.decode_record(data) for _, data in log.read_schemas(conn, self._run.run_key, source_id)
        )
        return {one.schema_id: one for one in decoded if isinstance(one, wire.LayerSchema)}

    def _unfolded(self) -> Iterator[Mapping[str, Any]]:
        for source in self._sources:
            with self._database.read() as conn:
                known = log.read_schemas(conn, self._run.run_key, source.source_id)
            schemas = {
                one.schema_id: one
                for one in (wire.decode_record(data) for _, data in known)
                if isinstance(one, (wire.ScalarSchema, wire.LayerSchema))
            }
            for seq, data in self._log(source.source_id):
                name = {"attempt": source.ordinal, "rank": source.rank, "seq": seq}
                yield {**name, **record_of(wire.decode_record(data), schemas)}

    def _log(self, source_id: int) -> Iterator[tuple[int, bytes]]:
        after = 0
        read: Callable[..., list[tuple[int, bytes]]] = log.read_frames
        while True:
            with self._database.read() as conn:
                found = read(conn, self._run.run_key, source_id, after, _LOG_BYTES_A_READ)
            if not found:
                return
            yield from found
            after = found[-1][0]
