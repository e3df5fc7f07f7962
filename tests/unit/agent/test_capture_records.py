"""The record stream: schemas once, frames in order and of bounded size, nothing lost to a full disk."""

from __future__ import annotations

import struct

import pytest

from gradiometer import records, wire

LAYERS = (wire.Layer(name="w", shape=(2,), numel=2),)


def columns(*names):
    return tuple(wire.Column(name) for name in names)


def decoded(builder):
    return [wire.decode_record(data) for data in builder.take()]


def kinds(decoded_records):
    return [type(record).__name__ for record in decoded_records]


def test_texts_that_are_no_unicode_do_not_cost_the_event():
    made = records.Records()
    attributes = {"title": "lone \ud800", "facts": {"path\udcff": ["x\udcff", 1.5, None]}}
    made.add_event(wire.Event(kind="check", time=1.0, step=3, attributes=attributes))
    [event] = map(wire.decode_record, made.take())
    assert event.attributes == {"title": "lone ?", "facts": {"path?": ["x?", 1.5, None]}}
    assert (event.kind, event.step) == ("check", 3)


def test_a_schema_is_declared_once_and_steps_share_a_frame():
    builder = records.Records()
    for step in (1, 2):
        builder.add_scalars(step, step + 0.5, columns("a", "b"), [step, -step])
    schema, frame = decoded(builder)
    builder.commit()
    assert schema.columns == columns("a", "b")
    assert (frame.schema_id, frame.steps, frame.times) == (schema.schema_id, (1, 2), (1.5, 2.5))
    assert struct.unpack("<4d", frame.values) == (1, -1, 2, -2)
    builder.add_scalars(3, 0.0, columns("a", "b"), [0, 0])
    assert kinds(decoded(builder)) == ["Frame"]


def test_another_order_or_merge_of_columns_is_another_schema():
    builder = records.Records()
    builder.add_scalars(1, 0.0, columns("a", "b"), [1, 2])
    builder.add_scalars(1, 0.0, columns("b", "a"), [1, 2])
    builder.add_scalars(1, 0.0, (wire.Column("a", "max"), wire.Column("b")), [1, 2])
    assert len([kind for kind in kinds(decoded(builder)) if kind == "ScalarSchema"]) == 3


def test_the_words_on_a_metric_keep_their_order_whatever_it_is_logged_with():
    """The server merges ranks, and takes the last word of each on a step until it speaks of a later one."""
    loss, val, lr = wire.Column("train/loss"), wire.Column("val/loss"), wire.Column("lr")
    said = [
        (1, (loss,)),
        (2, (loss,)),
        (3, (loss, val)),
        (4, (loss,)),
        (4, (loss, val)),
        (4, (loss,)),
        (5, (lr,)),
    ]
    said += [
        (5, (loss, val)),
        (6, (loss,)),
        (6, (val,)),
        (7, (val, lr)),
        (7, (lr,)),
        (8, (lr,)),
        (8, (val, lr)),
    ]
    builder, number, told = records.Records(), 0.0, {}
    for step, names in said:
        number += 1.0
        builder.add_scalars(step, 0.0, names, [number] * len(names))
        for column in names:
            told.setdefault(column.name, []).append((step, number))
    schemas, found = {}, {}
    for record in decoded(builder):
        if isinstance(record, wire.ScalarSchema):
            schemas[record.schema_id] = record.columns
            continue
        names = schemas[record.schema_id]
        values = struct.unpack(f"<{len(record.steps) * len(names)}d", record.values)
        for place, step in enumerate(record.steps):
            for at, column in enumerate(names):
                value = values[place * len(names) + at]
                found.setdefault(column.name, []).append((step, value))
    assert found == told


def test_sets_of_names_that_share_none_do_not_part_each_others_frames():
    builder = records.Records()
    for step in range(100):
        for name in ("a", "b", "c"):
            builder.add_scalars(step, 0.0, columns(name), (1.0,))
    frames = [one for one in decoded(builder) if isinstance(one, wire.Frame)]
    assert [len(frame.steps) for frame in frames] == [100, 100, 100]


def test_layers_come_before_scalars_and_events_stay_in_place():
    builder = records.Records()
    builder.add_scalars(1, 0.0, columns("a"), [1])
    builder.add_layers(1, 0.0, LAYERS, bytes(56))
    builder.add_event(wire.Event(kind="marker", time=0.0, step=1))
    builder.add_scalars(2, 0.0, columns("a"), [2])
    out = decoded(builder)
    assert kinds(out) == ["ScalarSchema", "LayerSchema", "Frame", "Frame", "Event", "Frame"]
    layer_frame, scalar_frame = out[2:4]
    assert layer_frame.schema_id == out[1].schema_id
    assert scalar_frame.schema_id == out[0].schema_id
    assert out[5].steps == (2,)


def test_equal_layers_in_another_object_are_the_same_schema():
    builder = records.Records()
    builder.add_layers(1, 0.0, LAYERS, bytes(56))
    builder.add_layers(2, 0.0, (wire.Layer(name="w", shape=(2,), numel=2),), bytes(56))
    assert kinds(decoded(builder)) == ["LayerSchema", "Frame"]


def test_a_schema_that_was_lost_is_declared_again():
    builder = records.Records()
    builder.add_scalars(1, 0.0, columns("a"), [1])
    first = decoded(builder)[0]
    builder.rollback()
    builder.add_scalars(2, 0.0, columns("a"), [2])
    again, frame = decoded(builder)
    builder.commit()
    assert again == first
    assert frame.steps == (2,)
    builder.rollback()
    builder.add_scalars(3, 0.0, columns("a"), [3])
    assert kinds(decoded(builder)) == ["Frame"], "what was committed is not undone"


def test_frames_stay_below_the_limit_of_a_record():
    builder = records.Records()
    wide = columns(*[f"m{index}" for index in range(1000)])
    for step in range(300):
        builder.add_scalars(step, 0.0, wide, [1.0] * 1000)
    encoded = builder.take()
    assert max(map(len, encoded)) < wire.MAX_RECORD_BYTES
    steps = [step for data in encoded[1:] for step in wire.decode_record(data).steps]
    assert steps == list(range(300))


def test_a_record_that_no_server_takes_is_refused_here():
    builder = records.Records()
    many = tuple(wire.Layer(name=f"{index}" + "x" * 400, shape=(1,), numel=1) for index in range(30_000))
    with pytest.raises(records.RecordTooLarge):
        builder.add_layers(1, 0.0, many, bytes(8))


def test_a_new_combination_of_names_at_every_step_does_not_declare_without_end():
    builder = records.Records()
    count = 3 * records.MAX_SCALAR_SCHEMAS
    for step in range(count):
        names = [f"m{bit}" for bit in range(10) if (step + 1) >> bit & 1]
        builder.add_scalars(step, 0.0, columns(*names), [float(step)] * len(names))
    out = decoded(builder)
    assert kinds(out).count("ScalarSchema") <= records.MAX_SCALAR_SCHEMAS + 10
    schemas = {record.schema_id: record for record in out if isinstance(record, wire.ScalarSchema)}
    points = {
        (column.name, step)
        for frame in out
        if isinstance(frame, wire.Frame)
        for step in frame.steps
        for column in schemas[frame.schema_id].columns
    }
    assert points == {
        (f"m{bit}", step) for step in range(count) for bit in range(10) if (step + 1) >> bit & 1
    }


def test_the_same_layers_with_fewer_statistics_are_another_schema():
    builder = records.Records()
    builder.add_layers(1, 0.0, LAYERS, bytes(56))
    builder.add_layers(2, 0.0, LAYERS, bytes(24), wire.NORM_STATISTICS)
    builder.add_layers(3, 0.0, LAYERS, bytes(56))
    out = decoded(builder)
    assert kinds(out) == ["LayerSchema", "Frame", "LayerSchema", "Frame", "Frame"]
    assert [schema.statistics for schema in (out[0], out[2])] == [wire.STATISTICS, wire.NORM_STATISTICS]
    assert [(out[at].schema_id, out[at].steps) for at in (1, 3, 4)] == [(1, (1,)), (2, (2,)), (1, (3,))]


def test_all_layers_of_a_step_come_before_those_of_the_next():
    builder = records.Records()
    others = (wire.Layer(name="v", shape=(2,), numel=2),)
    for step in (1, 2, 3):
        builder.add_layers(step, 0.0, LAYERS, bytes(56))
        builder.add_layers(step, 0.0, others, bytes(56))
    frames = [record for record in decoded(builder) if isinstance(record, wire.Frame)]
    assert [frame.steps for frame in frames] == [(1,), (1,), (2,), (2,), (3,), (3,)]


@pytest.mark.parametrize("alternate", [False, True], ids=["one schema", "two schemas"])
def test_layers_run_ahead_of_their_steps_scalars_by_a_few_steps_only(alternate):
    builder = records.Records()
    for step in range(1, 101):
        statistics = wire.NORM_STATISTICS if alternate and step % 2 else wire.STATISTICS
        builder.add_layers(step, 0.0, LAYERS, bytes(8 * len(statistics)), statistics)
        builder.add_scalars(step, 0.0, columns("scaler/skipped"), [0])
    layered = told = 0
    of_layers = set()
    for record in decoded(builder):
        if isinstance(record, wire.LayerSchema):
            of_layers.add(record.schema_id)
        elif isinstance(record, wire.Frame) and record.schema_id in of_layers:
            layered = max(record.steps)
            assert layered - told <= records.LAYER_STEPS
        elif isinstance(record, wire.Frame):
            told = max(record.steps)
    assert (layered, told) == (100, 100)
