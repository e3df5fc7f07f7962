"""What the ingest session accepts, refuses and answers: tables of every kind of bad input."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import msgspec
import pytest

from gradiometer import limits, wire
from gradiometer_server.errors import ProtocolError
from gradiometer_server.ingest.checks import KnownSchema
from gradiometer_server.ingest.session import Session, problem_of

RUN = wire.RunInfo(run_id="run-1", project="tests", name="a run", created_s=1.8e9)
SOURCE = wire.SourceInfo(rank=0, attempt=7, world_size=2)
WHO = (0, 7)


def hello(run: wire.RunInfo = RUN, *sources: wire.SourceInfo, protocol: int = 1) -> wire.Hello:
    return wire.Hello(protocol=protocol, agent_version="9.9", run=run, sources=sources or (SOURCE,))


def session(schemas: dict[int, KnownSchema] | None = None, *, acked_seq: int = 0) -> Session:
    one = Session()
    one.hello(hello())
    one.resume(WHO, acked_seq=acked_seq, schemas=schemas or {})
    return one


def columns(*names: str, schema_id: int = 1) -> wire.ScalarSchema:
    return wire.ScalarSchema(schema_id=schema_id, columns=tuple(wire.Column(name=name) for name in names))


def layers(*some: wire.Layer, statistics: tuple[str, ...] = wire.STATISTICS) -> wire.LayerSchema:
    return wire.LayerSchema(schema_id=2, layers=some, statistics=statistics)


def frame(*values: float, schema_id: int = 1, steps: tuple[int, ...] = (1,), **changed: Any) -> wire.Frame:
    one = wire.Frame(
        schema_id=schema_id,
        steps=steps,
        times=tuple(1.8e9 + step for step in steps),
        values=struct.pack(f"<{len(values)}d", *values),
    )
    return msgspec.structs.replace(one, **changed)


def records(*some: wire.Record | bytes, first_seq: int = 1, rank: int = 0) -> wire.Records:
    encoded = tuple(one if isinstance(one, bytes) else wire.encode(one) for one in some)
    return wire.Records(rank=rank, attempt=7, first_seq=first_seq, records=encoded)


WEIGHT = wire.Layer(name="w", shape=(2, 3), numel=6)


@pytest.mark.parametrize("protocol", [0, 2, 99])
def test_an_unknown_protocol_is_refused_with_both_versions_and_the_remedy(protocol: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        Session().hello(hello(protocol=protocol))
    problem = problem_of(caught.value)
    assert problem.fatal
    assert problem.code == "unknown_protocol"
    assert f"protocol {protocol}" in problem.message
    assert "protocol 1" in problem.message
    assert "9.9" in problem.message
    assert "pip install --upgrade gradiometer" in problem.remedy


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"run_id": ""}, "run.run_id"),
        ({"run_id": "r" * 129}, "run.run_id"),
        ({"run_id": "a\nb"}, "run.run_id"),
        ({"project": "p" * 129}, "run.project"),
        ({"project": " "}, "run.project"),
    ],
)
def test_a_hello_with_an_unusable_run_is_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        Session().hello(hello(msgspec.structs.replace(RUN, **changed)))
    assert caught.value.fatal
    assert caught.value.code == "invalid_hello"
    assert caught.value.message.startswith(f"hello: {field} ")
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"rank": -1}, "rank"),
        ({"rank": 2}, "rank"),
        ({"world_size": 0}, "world_size"),
        ({"attempt": 0}, "attempt"),
        ({"attempt": 2**60}, "attempt"),
        ({"start_step": -1}, "start_step"),
        ({"start_step": 2**53}, "start_step"),
        ({"started_s": math.inf}, "started_s"),
    ],
)
def test_a_hello_with_an_unusable_source_is_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        Session().hello(hello(RUN, msgspec.structs.replace(SOURCE, **changed)))
    assert caught.value.fatal
    assert f".{field}" in caught.value.message


def test_a_long_but_printable_run_name_passes() -> None:
    asked = hello(msgspec.structs.replace(RUN, name="ñ" * 500))
    assert Session().hello(asked) is asked


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({"name": ""}, {"name": RUN.run_id}),
        ({"name": "\n\t"}, {"name": RUN.run_id}),
        ({"name": "two\nlines"}, {"name": "two lines"}),
        ({"name": "n" * 501}, {"name": "n" * 499 + "…"}),
        ({"group": "g\x00"}, {"group": "g"}),
        ({"group": "\x00"}, {"group": None}),
        ({"tags": ("ok", "", "a\x1bb")}, {"tags": ("ok", "a b")}),
        ({"tags": tuple(f"t{i}" for i in range(300))}, {"tags": tuple(f"t{i}" for i in range(256))}),
        ({"notes": "x" * 65_537}, {"notes": "x" * 65_535 + "…"}),
        ({"config": {"a": "x" * 1_100_000, "b": 1}}, {"config": {"b": 1, limits.LEFT_OUT: ["a"]}}),
        ({"config": {"a": {1: 2}, "lr": 0.1}}, {"config": {"lr": 0.1, limits.LEFT_OUT: ["a"]}}),
        (
            {"config": {f"k{i:02d}": "x" * 100_000 for i in range(60)}},
            {
                "config": {
                    **{f"k{i:02d}": "x" * 100_000 for i in range(10)},
                    limits.LEFT_OUT: [*(f"k{i:02d}" for i in range(10, 30)), "and 30 more"],
                }
            },
        ),
    ],
)
def test_what_only_describes_a_run_is_made_to_fit_and_refuses_nothing(
    changed: dict[str, Any], kept: dict[str, Any]
) -> None:
    found = Session().hello(hello(msgspec.structs.replace(RUN, **changed)))
    assert found.run == msgspec.structs.replace(RUN, **kept)
    assert limits.config_problem(found.run.config) is None
    assert Session().hello(found) == found, "and what fits is left as it is"


def test_what_only_describes_a_process_is_made_to_fit() -> None:
    source = msgspec.structs.replace(SOURCE, environment={"python": "x" * 70_000}, host="h" * 600)
    [kept] = Session().hello(hello(RUN, source)).sources
    assert len(kept.environment["python"]) == limits.MAX_NOTES_CHARS
    assert len(kept.host) == limits.MAX_LABEL_CHARS


def test_one_rank_twice_or_another_run_on_the_connection_is_refused() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        Session().hello(hello(RUN, SOURCE, SOURCE))
    with pytest.raises(ProtocolError, match="one connection per run"):
        session().hello(hello(msgspec.structs.replace(RUN, run_id="other")))


def test_the_welcome_says_where_every_source_goes_on() -> None:
    welcome = session(acked_seq=41).welcome(server_version="1", window_bytes=1000)
    assert welcome.acked == (wire.SourceAck(rank=0, attempt=7, seq=41),)
    assert (welcome.protocol, welcome.window_bytes) == (wire.PROTOCOL_VERSION, 1000)


def test_records_before_a_hello_or_of_an_unnamed_rank_are_a_problem() -> None:
    with pytest.raises(ProtocolError) as caught:
        Session().records(records(columns("a")))
    assert (caught.value.code, caught.value.fatal) == ("hello_expected", True)
    with pytest.raises(ProtocolError) as caught:
        session().records(records(columns("a"), rank=1))
    assert (caught.value.code, caught.value.fatal) == ("unknown_source", False)
    assert "run run-1, attempt 7, rank 1" in caught.value.message


def test_good_records_are_accepted_whole_and_as_they_came() -> None:
    sent = records(columns("a", "b"), layers(WEIGHT), frame(1.0, math.nan), frame(*range(7), schema_id=2))
    accepted = session().records(sent)
    assert [seq for seq, _, _ in accepted.entries] == [1, 2, 3, 4]
    assert tuple(data for _, data, _ in accepted.entries) == sent.records
    assert accepted.ack() == wire.Ack(rank=0, attempt=7, seq=4)


def test_repeated_records_are_ignored_and_acknowledged() -> None:
    one = session()
    one.records(records(columns("a"), frame(1.0)))
    again = one.records(records(columns("a"), frame(1.0), frame(2.0, steps=(2,))))
    assert [seq for seq, _, _ in again.entries] == [3]
    assert again.ack().seq == 3
    nothing_new = one.records(records(columns("a")))
    assert nothing_new.entries == ()
    assert nothing_new.ack() == wire.Ack(rank=0, attempt=7, seq=3)


@pytest.mark.parametrize("first_seq", [7, 5, 0, -3])
def test_a_gap_names_the_number_expected_and_the_connection_goes_on(first_seq: int) -> None:
    one = session({1: KnownSchema(schema_id=1, width=1)}, acked_seq=3)
    with pytest.raises(ProtocolError) as caught:
        one.records(records(frame(1.0), first_seq=first_seq))
    problem = problem_of(caught.value, source=WHO, expected_seq=one.expected_seq(WHO))
    assert (problem.code, problem.fatal, problem.expected_seq) == ("sequence_gap", False, 4)
    assert f"record {first_seq} came, record 4 was expected" in problem.message
    assert one.records(records(frame(1.0), first_seq=4)).ack().seq == 4


TOO_LONG = "n" * 501
BAD_RECORDS: list[tuple[str, wire.Record | bytes, str, str]] = [
    ("malformed", b"\xc1", "malformed_record", "not a valid record"),
    ("of an unknown kind", msgspec.msgpack.encode({"type": "pigeon"}), "malformed_record", "pigeon"),
    ("too large", b"x" * (wire.MAX_RECORD_BYTES + 1), "record_too_large", "at most 8388608"),
    ("frame too short", frame(1.0, values=b"1234567"), "frame_length", "7 bytes"),
    ("frame too long", frame(1.0, 2.0), "frame_length", "are 8 bytes"),
    ("frame without steps", frame(steps=()), "empty_frame", "steps is empty"),
    ("fewer times than steps", frame(1.0, times=()), "frame_length", "0 times for 1 steps"),
    ("undeclared schema", frame(1.0, schema_id=9), "unknown_schema", "schema 9"),
    ("negative step", frame(1.0, steps=(-1,)), "step_out_of_range", "step -1"),
    ("step beyond 2**53", frame(1.0, steps=(2**53,)), "step_out_of_range", "step 9007199254740992"),
    ("time not finite", frame(1.0, times=(math.nan,)), "invalid_time", "times"),
    ("empty name", columns("", schema_id=5), "invalid_name", "the name is empty"),
    ("blank name", columns("ok", " \t", schema_id=5), "invalid_name", "columns[1]"),
    ("name of 1,000 characters", columns("n" * 1000, schema_id=5), "invalid_name", "1000 characters"),
    ("name of 501 characters", columns(TOO_LONG, schema_id=5), "invalid_name", "at most 500"),
    ("name with a control character", columns("a\x00b", schema_id=5), "invalid_name", "U+0000"),
    ("column twice", columns("a", "b", "a", schema_id=5), "duplicate_name", "'a' appears twice"),
    ("no columns", columns(schema_id=5), "invalid_schema", "0 columns"),
    ("schema twice", columns("z", schema_id=1), "repeated_schema", "a second time"),
    ("negative schema id", columns("z", schema_id=-1), "invalid_schema", "schema -1"),
    (
        "environment without facts",
        wire.Event(kind="environment", time=1.0, attributes={"facts": "fast"}),
        "invalid_event",
        "expected dict",
    ),
    ("unknown statistic", layers(WEIGHT, statistics=("count", "median")), "unknown_statistics", "median"),
    ("no norm", layers(WEIGHT, statistics=("count", "num_nonfinite")), "unknown_statistics", "sum_squares"),
    ("other order", layers(WEIGHT, statistics=("count", "num_nonfinite", "sum_squares")), "unknown_statistics", "order"),
    ("a statistic twice", layers(WEIGHT, statistics=("count", *wire.NORM_STATISTICS)), "unknown_statistics", "order"),
    ("layer twice", layers(WEIGHT, WEIGHT), "duplicate_name", "'w' appears twice"),
    ("layer without a name", layers(wire.Layer(name="", shape=(), numel=1)), "invalid_name", "layers[0]"),
    ("wrong numel", layers(wire.Layer(name="w", shape=(2, 3), numel=5)), "invalid_layer", "numel 5"),
    ("negative size", layers(wire.Layer(name="w", shape=(-1, 3), numel=-3)), "invalid_layer", "negative"),
    ("no shards", layers(wire.Layer(name="w", shape=(1,), numel=1, num_shards=0)), "invalid_layer", "num_shards is 0"),
    (
        "shard outside",
        layers(wire.Layer(name="w", shape=(1,), numel=1, shard=(2,), num_shards=2)),
        "invalid_layer",
        "outside its 2 shards",
    ),
    (
        "shard not named",
        layers(wire.Layer(name="w", shape=(1,), numel=1, num_shards=2)),
        "invalid_layer",
        "no shard coordinates",
    ),
    ("event time", wire.Event(kind="message", time=math.inf, attributes={"text": ""}), "invalid_time", "inf"),
    ("event step", wire.Event(kind="marker", time=1.0, step=-1, attributes={"name": "x"}), "step_out_of_range", "-1"),
    ("event text", wire.Event(kind="message", time=1.0, attributes={"text": 3}), "invalid_event", "'text' is 3"),
    ("exit code", wire.Event(kind="exit", time=1.0, attributes={"code": "0"}), "invalid_event", "int or nothing"),
    ("exit flag", wire.Event(kind="exit", time=1.0, attributes={"code": True}), "invalid_event", "'code' is True"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "code", "said"), [case[1:] for case in BAD_RECORDS], ids=[case[0] for case in BAD_RECORDS]
)
def test_a_bad_record_is_refused_by_itself(bad: wire.Record | bytes, code: str, said: str) -> None:
    accepted = session().records(records(columns("a"), frame(1.0), bad, frame(2.0, steps=(2,))))
    assert [seq for seq, _, _ in accepted.entries] == [1, 2, 4], "what is good goes on"
    (rejection,) = accepted.ack().rejected
    assert (rejection.seq, rejection.code) == (3, code)
    assert rejection.message.startswith("run run-1, attempt 7, rank 0, record 3: ")
    assert said in rejection.message
    assert rejection.message.count(". ") >= 1, "a remedy follows"
    assert accepted.ack().seq == 4, "it is not asked for again"


def test_frames_of_a_refused_schema_are_refused_too() -> None:
    accepted = session().records(records(columns(""), frame(1.0)))
    assert [rejection.code for rejection in accepted.rejected] == ["invalid_name", "unknown_schema"]
    assert accepted.ack().seq == 2


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        5e-324,
        -0.0,
        struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf0\x7f")[0],
    ],
)
def test_every_float_passes_bit_for_bit(value: float) -> None:
    accepted = session().records(records(columns("a"), frame(value)))
    _, data, decoded = accepted.entries[1]
    assert isinstance(decoded, wire.Frame)
    assert decoded.values == struct.pack("<d", value)
    assert data == wire.encode(frame(value))


@pytest.mark.parametrize("name", ["train/损失", "x" * 500, "a b", "Ω²", "\u202eabc", "'; drop table run; --"])
def test_any_printable_name_passes(name: str) -> None:
    assert session().records(records(columns(name))).rejected == ()


def test_schemas_survive_a_reconnect() -> None:
    later = session({1: KnownSchema(schema_id=1, width=2)}, acked_seq=5)
    accepted = later.records(records(frame(1.0, 2.0), frame(1.0, steps=(2,)), first_seq=6))
    assert [seq for seq, _, _ in accepted.entries] == [6]
    assert accepted.rejected[0].code == "frame_length"


def test_a_source_that_declares_a_schema_per_step_is_stopped() -> None:
    many = {number: KnownSchema(schema_id=number, width=1) for number in range(10_000)}
    accepted = session(many).records(records(columns("a", schema_id=20_000)))
    assert accepted.rejected[0].code == "too_many_schemas"
    assert "do not put a changing number into a name" in accepted.rejected[0].message


def test_accepted_is_a_value() -> None:
    accepted = session().records(records(columns("a")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        accepted.last_seq = 3  # type: ignore[misc]
