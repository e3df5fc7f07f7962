"""Writing and reading a spool: numbers, segments, limits, disks that refuse."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from gradiometer import spool, wire
from gradiometer.spool import SpoolCorrupt, SpoolError, SpoolFull, SpoolMissing, SpoolWriter
from gradiometer.spool_reader import SpoolReader, Tail
from gradiometer.spool_segment import MAGIC, segments

LARGE = 3 * 1024 * 1024


def run_info(run_id: str = "run") -> wire.RunInfo:
    return wire.RunInfo(run_id=run_id, project="tests", name="a name", created_s=1.5, config={"lr": 1e-3})


def source_info(rank: int = 0) -> wire.SourceInfo:
    return wire.SourceInfo(rank=rank, attempt=42, world_size=4)


def firsts(directory: Path) -> list[int]:
    return [first for first, _ in segments(directory)]


def test_a_source_has_the_layout_of_the_architecture(tmp_path: Path) -> None:
    writer = spool.open_source(tmp_path, run_info("a/b"), source_info(3))
    assert writer.append(b"x") == 1
    assert writer.directory == tmp_path / "a%2Fb" / "42" / "rank-00003"
    assert writer.attempt_directory == tmp_path / "a%2Fb" / "42"
    assert {path.name for path in writer.directory.iterdir()} == {"source.json", "00000001.seg"}
    assert spool.read_run(writer.attempt_directory) == run_info("a/b")
    described = spool.read_source(writer.directory)
    assert described.source == source_info(3)
    assert described.pid == os.getpid()
    assert described.process_start
    assert (writer.directory / "00000001.seg").read_bytes().startswith(MAGIC)
    writer.close()


@pytest.mark.parametrize("run_id", ["..", ".", ".hidden", "日本語", "x" * 128, "é" * 128, "a b", "100%"])
def test_any_run_id_becomes_one_folder_of_its_own(run_id: str, tmp_path: Path) -> None:
    writer = spool.open_source(tmp_path, run_info(run_id), source_info())
    writer.close()
    assert writer.attempt_directory.parent.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == [spool.run_folder(run_id)]


def test_a_spool_that_is_continued_keeps_the_writer_that_began_it(tmp_path: Path) -> None:
    first, second = (
        msgspec.structs.replace(source_info(), host="h", pid=pid, started_s=float(pid), world_size=pid)
        for pid in (1, 2)
    )
    spool.open_source(tmp_path, run_info("r"), first).close()
    directory = spool.open_source(tmp_path, run_info("r"), second).directory
    said = spool.read_source(directory).source
    assert (said.host, said.pid, said.started_s, said.world_size) == ("h", 1, 1.0, 2)
    assert spool.read_source(directory).pid == os.getpid()


def test_long_run_ids_that_begin_alike_do_not_share_a_folder() -> None:
    assert spool.run_folder("é" * 127 + "a") != spool.run_folder("é" * 127 + "b")


def test_records_are_numbered_from_one_and_read_back(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    assert writer.seq == 0
    assert [writer.append(record) for record in (b"a", b"", b"c")] == [1, 2, 3]
    assert writer.append_batch([b"d", b"e"]) == 5
    writer.close()
    reader = SpoolReader(tmp_path)
    assert list(reader.records()) == [(1, b"a"), (2, b""), (3, b"c"), (4, b"d"), (5, b"e")]
    assert reader.read(6, 100) == []
    reader.close()


def test_a_full_segment_is_followed_by_the_next(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    records = [bytes([number]) * LARGE for number in range(7)]
    for record in records:
        writer.append(record)
    writer.close()
    assert firsts(tmp_path) == [1, 4, 7]
    reader = SpoolReader(tmp_path)
    assert [record for _, record in reader.records()] == records
    assert [record for _, record in reader.records(5)] == records[4:]
    reader.close()


def test_a_reader_follows_a_writer_without_waiting(tmp_path: Path) -> None:
    writer, reader = SpoolWriter(tmp_path), SpoolReader(tmp_path)
    assert reader.read(1, 1000) == []
    writer.append(b"a")
    assert reader.read(1, 1000) == [b"a"]
    assert reader.read(2, 1000) == []
    writer.append_batch([b"b", b"c"])
    assert reader.read(2, 1000) == [b"b", b"c"]
    writer.append(b"L" * LARGE)
    assert reader.read(4, 1000) == [b"L" * LARGE], "one record is read whole, whatever its size"
    assert reader.read(2, 1000) == [b"b", b"c"], "a reader can go back"
    reader.close()
    writer.close()


def test_a_reader_gathers_about_as_many_bytes_as_asked(tmp_path: Path) -> None:
    writer, reader = SpoolWriter(tmp_path), SpoolReader(tmp_path)
    writer.append_batch([b"x" * 84] * 100)
    assert len(reader.read(1, 1000)) == 10
    assert len(reader.read(11, 1050)) == 10
    reader.close()
    writer.close()


def test_concurrent_reading_sees_every_record_whole(tmp_path: Path) -> None:
    records = [os.urandom(number % 5000) for number in range(2000)]
    writer, reader = SpoolWriter(tmp_path), SpoolReader(tmp_path)
    thread = threading.Thread(target=lambda: [writer.append(record) for record in records])
    thread.start()
    read: list[bytes] = []
    while len(read) < len(records) and (thread.is_alive() or len(read) < writer.seq):
        read += reader.read(len(read) + 1, 20_000)
    thread.join()
    assert read == records
    reader.close()
    writer.close()


def test_acknowledged_segments_are_deleted_and_the_last_one_stays(tmp_path: Path) -> None:
    writer, reader = SpoolWriter(tmp_path), SpoolReader(tmp_path)
    for _ in range(7):
        writer.append(b"x" * LARGE)
    for acked_seq, left in ((2, [1, 4, 7]), (3, [4, 7]), (5, [4, 7]), (7, [7])):
        reader.delete_acknowledged(acked_seq)
        assert firsts(tmp_path) == left
    with pytest.raises(SpoolMissing, match=r"record 3 is asked for.*begins at 7") as caught:
        reader.read(3, 100)
    assert (caught.value.seq, caught.value.first_seq) == (3, 7)
    writer.close()
    assert SpoolWriter(tmp_path).seq == 7
    reader.close()


def test_a_full_spool_refuses_takes_essential_records_and_recovers_when_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(spool, "_RECOUNT_S", 0.0)
    writer, reader = SpoolWriter(tmp_path, max_bytes=5000), SpoolReader(tmp_path)
    for _ in range(11):
        writer.append(b"x" * 400)
    full_seq = writer.seq
    with pytest.raises(SpoolFull, match=r"its limit is 5000.*GRADIOMETER_SPOOL_MAX_BYTES"):
        writer.append(b"x" * 400)
    assert writer.append(b"the end", essential=True) == full_seq + 1
    with pytest.raises(SpoolFull):
        writer.append(b"x" * 400)
    reader.delete_acknowledged(full_seq)
    assert writer.append(b"more") == full_seq + 2
    assert [seq for seq, _ in reader.records(full_seq)] == [full_seq, full_seq + 1, full_seq + 2]
    writer.close()
    reader.close()


def test_a_record_that_no_server_takes_is_refused_before_it_is_written(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    with pytest.raises(SpoolError, match="split the frame"):
        writer.append(b"x" * (wire.MAX_RECORD_BYTES + 1))
    assert writer.append(b"x" * wire.MAX_RECORD_BYTES) == 1
    writer.close()


@pytest.mark.parametrize("text", ["many", "0", "-5", "1.5"])
def test_a_bad_limit_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIOMETER_SPOOL_MAX_BYTES", text)
    with pytest.raises(SpoolError, match=f"GRADIOMETER_SPOOL_MAX_BYTES is '{text}'"):
        spool.open_source(tmp_path, run_info(), source_info())


def test_a_root_that_cannot_be_made_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SpoolError, match=r"cannot create the spool at .*file.*: Not a directory.*GRADIOMETER_SPOOL"
    ):
        spool.open_source(tmp_path / "file", run_info(), source_info())


def test_a_config_that_json_cannot_hold_is_an_error_of_the_spool(tmp_path: Path) -> None:
    run = wire.RunInfo(run_id="run", project="p", name="n", created_s=0.0, config={"f": object()})
    with pytest.raises(SpoolError, match="the run's config cannot be written as JSON"):
        spool.open_source(tmp_path, run, source_info())


def test_the_first_rank_describes_the_run(tmp_path: Path) -> None:
    first = spool.open_source(tmp_path, run_info(), source_info(0))
    other = wire.RunInfo(run_id="run", project="other", name="other", created_s=9.0)
    second = spool.open_source(tmp_path, other, source_info(1))
    assert spool.read_run(first.attempt_directory).project == "tests"
    first.close()
    second.close()


def test_a_damaged_description_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": 3}))
    with pytest.raises(SpoolError, match=r"run\.json cannot be understood"):
        spool.read_run(tmp_path)


FULL_DISK = """
import resource, sys
from pathlib import Path
from gradiometer.spool import SpoolError, SpoolWriter
writer = SpoolWriter(Path(sys.argv[1]))
writer.append(b"a" * 500)
# A limit on the file's size fails like a full disk: a short write, then an error.
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        writer.append(b"b" * 900)
    except SpoolError as error:
        print(error)
print(writer.append(b"c"))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(writer.append(b"d" * 900))
"""


def test_a_disk_that_takes_half_a_record_leaves_none_of_it(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    lines = answer.stdout.splitlines()
    assert lines[2:] == ["2", "3"]
    assert all("cannot append to the spool" in line and str(tmp_path) in line for line in lines[:2])
    reader = SpoolReader(tmp_path)
    assert [record[:1] for _, record in reader.records()] == [b"a", b"c", b"d"]
    reader.close()


def test_a_spool_that_lost_what_the_server_has_goes_on_after_it(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    writer.append(b"1")
    writer.close()
    writer = SpoolWriter(tmp_path, acked_seq=5)
    assert writer.append(b"6") == 6
    writer.close()
    reader = SpoolReader(tmp_path)
    assert reader.read(6, 100) == [b"6"]
    with pytest.raises(SpoolCorrupt) as caught:
        reader.read(2, 100)
    assert (caught.value.seq, caught.value.resume_seq) == (2, 6)
    reader.close()
    assert Tail(tmp_path).advance() == 6


def test_a_tail_knows_the_last_record_without_reading_the_others(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    assert (tail.advance(), tail.last_record()) == (0, None)
    writer = SpoolWriter(tmp_path)
    for record in (
        b"a",
        b"L" * wire.MAX_RECORD_BYTES,
        b"",
        b"end",
    ):
        writer.append(record)
        assert tail.advance() == writer.seq
        assert tail.last_record() == record
    with segments(tmp_path)[-1][1].open("ab") as file:
        file.write(b"half a header")
    assert (tail.advance(), tail.last_record()) == (4, b"end")
    writer.close()


def test_appending_costs_one_short_system_call(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(2000):
        writer.append(b"x" * 200)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s / 2000 < 100e-6
    writer.close()
