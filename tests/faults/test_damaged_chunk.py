"""A flipped bit in a stored chunk is found by `db check` and said by every read of it; all other metrics stay readable."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select, update

from gradiometer_server.domain.names import run_key
from gradiometer_server.store.database import Database
from gradiometer_server.store.tables import chunk, series
from gradiometer_server.summaries import buckets, codec
from gradiometer_server.summaries.blocks import Block, decode_points, encode_points, problem_of
from tests.support.eventually import eventually
from tests.support.server import Server
from tests.support.wire_client import WireClient, exit_event, frame, layer_schema, scalar_schema

NUM_STEPS = 2000
METRICS = ("sound", "values", "summary", "number", "stride")
DAMAGE = {
    "values": "data", "summary": "summary", "number": "n", "stride": "stride", "uneven": "steps", "layer/norm": "data",
}  # fmt: skip
"""By metric, the column of its chunk in which a bit is turned over."""


@pytest.fixture
def stored(server: Callable[..., Server], database_url: str) -> Server:
    """A stopped server whose database holds a run of scalars, one with uneven steps, and two layers, all in chunks."""
    one = server(database_url)
    with WireClient(one.url, "r") as client:
        client.hello()
        client.send(
            scalar_schema(*METRICS), scalar_schema("uneven", schema_id=3), layer_schema(("w0", 4), ("w1", 4))
        )
        client.send(frame({step: (step * 0.5,) * len(METRICS) for step in range(NUM_STEPS)}))
        client.send(frame({step * step: (step * 0.25,) for step in range(200)}, schema_id=3))
        client.send(frame(dict.fromkeys(range(50), (4.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0) * 2), schema_id=2))
        client.send(exit_event())
    eventually(lambda: one.get("/runs/r")["state"] == "finished", what="the run has ended")
    one.stop()
    return one


def flip(url: str, metric: str, column: str) -> None:
    """Turn over one bit in the middle of a blob of a metric's chunk, or the second bit of a number."""
    with closing(Database(url)) as database, database.write() as conn:
        of_series = select(series.c.series_id).where(
            series.c.run_id == run_key("r"), series.c.key == metric, series.c.num_points > 0
        )
        here = (chunk.c.run_id == run_key("r"), chunk.c.series_id == of_series.scalar_subquery())
        (row,) = conn.execute(select(chunk).where(*here)).all()
        conn.execute(update(chunk).where(*here).values({column: flipped(getattr(row, column))}))


def flipped(value: Any) -> Any:
    if isinstance(value, int):
        return value ^ 2
    middle = len(value) // 2
    return value[:middle] + bytes((value[middle] ^ 4,)) + value[middle + 1 :]


def check(url: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "gradiometer_server", "db", "check", "--database", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def read(one: Server, metric: str) -> str | None:
    """Read a metric at every zoom, and return what it says of damage."""
    told = []
    for most in (5000, 5):
        asked = {"series": [{"run": "r", "metric": metric}], "buckets": most}
        found = one.post("/series/query", asked)["series"][0]
        if "error" in found:
            told.append(found["error"])
        else:
            assert found["points"]["max"][-1] == max(found["points"]["max"])
            assert len(found["points"]["step"]) > 1
    return told[0] if told else None


def test_damage_is_found_and_said_and_stays_where_it_is(stored: Server) -> None:
    assert check(stored.database_url) == (0, ["no problem found"])
    for metric, column in DAMAGE.items():
        flip(stored.database_url, metric, column)
    code, said = check(stored.database_url)
    assert code == 1
    for metric in DAMAGE:
        assert any(f"run r, {metric}, attempt 1" in line for line in said), said
    assert not any("sound" in line or "_time" in line for line in said)
    stored.start()
    assert read(stored, "sound") is None
    assert read(stored, "_time") is None
    for metric in set(DAMAGE) - {"layer/norm"}:
        told = read(stored, metric)
        assert told is not None
        assert metric in told
        assert "damaged" in told
        assert "db check" in told
    layers = httpx.get(f"{stored.url}/api/v1/runs/r/layers", params={"statistic": "norm"})
    assert layers.json()["code"] == "corrupt_data"
    assert "layer/norm" in layers.json()["detail"]
    assert stored.get("/runs/r/layers", statistic="rms")["values"]
    assert len(stored.get("/runs")["runs"]) == 1
    assert "Traceback" not in stored.log


steps = np.cumsum(np.arange(1, 300, dtype=np.int64))
values = np.column_stack([np.sin(np.arange(299.0)), np.where(np.arange(299) % 50, 1.0, np.nan)])
BLOCK = encode_points(steps, values)
EVEN = encode_points(np.arange(299, dtype=np.int64) * 7, values)


@given(st.sampled_from(["data", "summary", "steps"]), st.floats(0, 1, exclude_max=True))
def test_any_bit_of_a_chunk_is_noticed_by_check_and_by_a_read_or_changes_nothing(
    column: str, share: float
) -> None:
    blob = bytearray(getattr(BLOCK, column))
    place = int(share * len(blob) * 8)
    blob[place // 8] ^= 1 << place % 8
    damaged = dataclasses.replace(BLOCK, **{column: bytes(blob)})
    try:
        found = decode_points(damaged, 2)
        windows = buckets.decode_summaries(
            [damaged.summary], width=BLOCK.summary_width, columns=2, narrow=BLOCK.dtype == "f4"
        )
    except codec.CorruptData:
        assert problem_of(damaged, 2) is not None
        return
    # zstd has a bit that readers must ignore, and sometimes two spellings of one content.
    assert (found[0] == steps).all()
    assert found[1].tobytes() == values.tobytes()
    assert (windows.max_BW == buckets.bucketise(steps, values, BLOCK.summary_width).max_BW).all()


@pytest.mark.parametrize("name", ["step0", "step1", "n", "stride", "summary_width", "num_nonfinite"])
@pytest.mark.parametrize("bit", range(12))
def test_any_bit_of_a_chunks_numbers_is_noticed_by_check(name: str, bit: int) -> None:
    for block in (BLOCK, EVEN):
        damaged = dataclasses.replace(block, **{name: getattr(block, name) ^ (1 << bit)})
        assert problem_of(damaged, 2) is not None


def test_a_block_of_another_codec_is_refused_by_name() -> None:
    damaged: Block = dataclasses.replace(BLOCK, data=b"\x07" + BLOCK.data[1:])
    assert "0702" in str(problem_of(damaged, 2))
