"""Whatever happens to the bytes of a spool, a reader returns true records or says that it cannot."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gradiometer import spool
from gradiometer.spool import SpoolCorrupt, SpoolWriter
from gradiometer.spool_reader import SpoolReader, Tail
from gradiometer.spool_segment import MAGIC

RECORDS = st.lists(st.binary(max_size=60), min_size=1, max_size=12)
QUICK = settings(max_examples=150, deadline=None)


@contextmanager
def spool_of(records: list[bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        writer = SpoolWriter(Path(folder))
        for record in records:
            writer.append(record)
        writer.close()
        yield Path(folder)


def read_all(directory: Path) -> tuple[list[tuple[int, bytes]], SpoolCorrupt | None]:
    """Every record that can be read, going on after damage, and the first damage met."""
    reader, found, first_damage, seq = SpoolReader(directory), [], None, 1
    try:
        while True:
            try:
                batch = reader.read(seq, 64)
            except SpoolCorrupt as damage:
                first_damage = first_damage or damage
                if damage.resume_seq is None:
                    return found, first_damage
                seq = damage.resume_seq
                continue
            if not batch:
                return found, first_damage
            found += enumerate(batch, seq)
            seq += len(batch)
    finally:
        reader.close()


@QUICK
@given(records=RECORDS, data=st.data())
def test_cutting_the_last_segment_anywhere_leaves_a_prefix(records: list[bytes], data: st.DataObject) -> None:
    with spool_of(records) as directory:
        segment = directory / "00000001.seg"
        cut = data.draw(st.integers(0, segment.stat().st_size))
        segment.write_bytes(segment.read_bytes()[:cut])
        read, damage = read_all(directory)
        assert damage is None
        assert [record for _, record in read] == records[: len(read)]
        whole = sum(len(record) + 16 for record in records) + len(MAGIC)
        assert (len(read) == len(records)) == (cut == whole)


@QUICK
@given(records=RECORDS, more=RECORDS, data=st.data())
def test_a_writer_continues_after_a_cut_without_reusing_or_skipping_numbers(
    records: list[bytes], more: list[bytes], data: st.DataObject
) -> None:
    with spool_of(records) as directory:
        segment = directory / "00000001.seg"
        cut = data.draw(st.integers(0, segment.stat().st_size))
        segment.write_bytes(segment.read_bytes()[:cut])
        kept = len(read_all(directory)[0])
        reader = SpoolReader(directory)
        assert len(list(reader.records())) == kept
        writer = SpoolWriter(directory)
        assert [writer.append(record) for record in more] == list(range(kept + 1, kept + 1 + len(more)))
        writer.close()
        assert list(reader.records(kept + 1)) == list(enumerate(more, kept + 1))
        reader.close()
        assert [record for _, record in read_all(directory)[0]] == records[:kept] + more
        assert Tail(directory).advance() == kept + len(more)


@QUICK
@given(records=RECORDS, data=st.data())
def test_any_changed_byte_is_noticed_and_costs_only_the_record_it_is_in(
    records: list[bytes], data: st.DataObject
) -> None:
    with spool_of(records) as directory:
        segment = directory / "00000001.seg"
        content = bytearray(segment.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        segment.write_bytes(content)
        read, damage = read_all(directory)
        assert all(records[seq - 1] == record for seq, record in read)
        if at < len(MAGIC):
            assert damage is not None
            assert not read
        else:
            assert len(read) == len(records) - 1
            assert damage is not None or read == list(enumerate(records[:-1], 1))


@QUICK
@given(records=RECORDS, data=st.data())
def test_reading_may_begin_at_any_record(records: list[bytes], data: st.DataObject) -> None:
    with spool_of(records) as directory:
        first = data.draw(st.integers(1, len(records) + 1))
        reader = SpoolReader(directory)
        assert list(reader.records(first)) == list(enumerate(records, 1))[first - 1 :]
        reader.close()
        assert spool.read_acked(directory) == 0
