"""The ring: what it keeps, when it is shipped, that no step is shipped twice, and that it is bounded."""

from __future__ import annotations

import struct

import pytest

from gradiometer import spool as spool_module
from gradiometer import wire
from gradiometer.commands import FILE, Inbox, Outbox
from gradiometer.drops import Drops
from gradiometer.feeder import Feeder
from gradiometer.recorder import MAX_SHIPS, NUM_STEPS, QUIET_STEPS, STEPS_AFTER, TOO_OFTEN, Ring
from gradiometer.records import Records
from tests.support.recorded import recorded

LAYERS = (wire.Layer("a", (3,), 3), wire.Layer("b", (2,), 2))
WIDTH = len(LAYERS) * len(wire.STATISTICS)


def row(value=1.0):
    return struct.pack(f"<{WIDTH}d", *[value] * WIDTH)


def details(ring, **kwargs):
    return [one for one in ring.due(**kwargs) if isinstance(one, wire.Detail)]


def fed(ring, steps, *, bad=(), skipped=()):
    """Feed steps; returns every detail with the step at which it was due."""
    found = []
    for step in steps:
        ring.keep(7, step, 100.0 + step, row(float("nan") if step in bad else float(step)))
        ring.end_step(step, skipped=step in skipped)
        found += [(step, one) for one in details(ring)]
    return found


def test_a_nonfinite_step_ships_the_256_steps_up_to_it_and_eight_after():
    found = fed(Ring(Drops()), range(1, 401), bad={300})
    assert [at for at, _ in found] == [300, 300 + STEPS_AFTER]
    before, after = (one for _, one in found)
    assert before.steps == tuple(range(300 - NUM_STEPS, 301))
    assert after.steps == tuple(range(301, 301 + STEPS_AFTER))
    assert before.times == tuple(100.0 + step for step in before.steps)
    assert before.values[-WIDTH * 16 : -WIDTH * 8] == row(299.0)
    assert (before.kind, before.schema_id, before.trigger_step) == ("ring", 7, 300)
    assert "gradient" in before.reason


def test_a_busy_agent_that_takes_in_many_steps_at_once_still_sends_those_before():
    ring = Ring(Drops())
    for step in range(1, 501):
        ring.keep(7, step, 0.0, row(float("nan") if step == 300 else 1.0))
        ring.end_step(step, skipped=False)
    assert [one.steps for one in details(ring)] == [tuple(range(300 - NUM_STEPS, 501))]
    for step in range(501, 900):
        ring.keep(7, step, 0.0, row())
    assert len(ring._entries) == NUM_STEPS + 1


@pytest.mark.parametrize("statistics", [wire.STATISTICS, wire.NORM_STATISTICS])
@pytest.mark.parametrize(
    ("sum_squares", "num_nonfinite"), [(float("inf"), 0.0), (float("nan"), 0.0), (float("inf"), 1.0)]
)
def test_a_sum_of_squares_alone_does_not_make_a_gradient_nonfinite(statistics, sum_squares, num_nonfinite):
    """Infinite for finite float64 elements beyond 1e154; NaN for a gradient that cannot be read."""
    records = Records(Ring(Drops()))
    row = dict.fromkeys(statistics, 1.0) | {"sum_squares": sum_squares, "num_nonfinite": num_nonfinite}
    healthy = dict.fromkeys(statistics, 0.0)
    values = [*row.values(), *healthy.values()]
    records.add_layers(1, 0.0, LAYERS, struct.pack(f"<{len(values)}d", *values), statistics)
    records.ring.end_step(1, skipped=False)
    assert bool(details(records.ring)) == bool(num_nonfinite)


def test_a_step_that_the_scaler_skipped_is_its_normal_business():
    assert fed(Ring(Drops()), range(1, 50), bad={3, 9}, skipped={3, 9}) == []


def test_a_loss_or_an_activation_that_is_not_finite_ships_too():
    ring = Ring(Drops())
    fed(ring, range(1, 10))
    ring.see_scalars(10, (wire.Column("train/lr"), wire.Column("train/loss")), (1.0, 2.0))
    ring.see_scalars(10, (wire.Column("time/step_s"),), (float("nan"),))
    assert details(ring) == []
    ring.see_scalars(10, (wire.Column("train/loss"),), (float("inf"),))
    assert details(ring)[0].reason == "train/loss is not finite"
    ring = Ring(Drops())
    fed(ring, range(1, 10))
    ring.end_step(9, skipped=False, modules=["block.2"])
    assert "block.2" in details(ring)[0].reason


def test_no_step_is_shipped_twice_and_the_number_of_ships_is_bounded_and_counted():
    drops, gap = Drops(), QUIET_STEPS + 5
    bad = {gap * k for k in range(1, MAX_SHIPS + 3)}
    found = fed(Ring(drops), range(1, gap * (MAX_SHIPS + 4)), bad=bad)
    steps = [step for _, one in found for step in one.steps]
    assert len(steps) == len(set(steps))
    assert len({one.trigger_step for _, one in found}) == MAX_SHIPS
    assert drops.totals == {TOO_OFTEN: 2}


def test_trouble_that_stays_is_one_incident():
    drops = Drops()
    found = fed(Ring(drops), range(1, 500), bad=set(range(100, 500)))
    assert {one.trigger_step for _, one in found} == {100}
    assert drops.totals == {}


def test_the_server_asks_once_and_not_for_what_was_shipped_already():
    ring = Ring(Drops())
    fed(ring, range(1, 101), bad={100})
    ring.ask(wire.Command(id="1", kind="ring", step=100, reason="alert"))
    assert len(fed(ring, range(101, 130))) == 1
    ring.ask(wire.Command(id="2", kind="ring", step=125, reason="alert spike"))
    (one,) = details(ring)
    assert (one.reason, one.trigger_step, one.steps) == ("alert spike", 125, tuple(range(109, 130)))


def test_steps_after_are_shipped_at_the_end_at_the_latest():
    ring = Ring(Drops())
    assert len(fed(ring, range(1, 104), bad={100})) == 1
    (one,) = details(ring, final=True)
    assert one.steps == (101, 102, 103)


def test_a_huge_model_keeps_fewer_steps_and_says_so():
    ring = Ring(Drops(), max_bytes=20 * (len(row()) + 200))
    for step in range(1, 101):
        ring.keep(1, step, 0.0, row())
    (note,) = ring.due()
    assert note.kind == "unavailable"
    assert note.attributes["metric"] == "ring"
    assert "only the last 20 of 256 steps" in note.attributes["reason"]
    ring.ask(wire.Command(id="1", kind="ring"))
    (one,) = details(ring)
    assert one.steps == tuple(range(81, 101))


def test_records_are_split_below_the_limit():
    ring = Ring(Drops())
    large = b"\0" * (3 * 2**20)
    for step in range(1, 11):
        ring.keep(1, step, 0.0, large)
    ring.ask(wire.Command(id="1", kind="ring"))
    found = details(ring)
    assert [step for one in found for step in one.steps] == list(range(1, 11))
    assert all(len(wire.encode(one)) < wire.MAX_RECORD_BYTES for one in found)


def test_a_schema_that_was_lost_with_a_full_disk_is_declared_again_before_the_ring():
    records = Records(Ring(Drops()))
    records.add_layers(1, 0.0, LAYERS, row())
    records.take()
    records.rollback()
    records.ring.ask(wire.Command(id="1", kind="ring"))
    records.add_ring()
    kinds = [wire.decode_record(data) for data in records.take()]
    assert [type(one).__name__ for one in kinds] == ["LayerSchema", "Detail"]
    assert kinds[0].schema_id == kinds[1].schema_id


def test_a_command_reaches_the_agents_thread_once(tmp_path):
    outbox, inbox = Outbox(tmp_path, rank=3), Inbox(tmp_path)
    for_me = wire.Command(id="a", kind="ring", rank=3, reason="alert", step=5)
    assert outbox.put(for_me)
    assert not outbox.put(for_me), "a repeated command is not written again"
    assert not outbox.put(wire.Command(id="b", kind="ring", rank=2)), "of another rank"
    assert not outbox.put(wire.Command(id="c", kind="make coffee")), "not understood"
    assert inbox.look() == [for_me]
    assert inbox.look() == [], "once a second at most"
    inbox._looked_s = 0.0
    assert inbox.look() == []
    # A new uplink knows nothing of the old one's commands, and gets them again.
    Outbox(tmp_path, rank=3).put(for_me)
    inbox._looked_s = 0.0
    assert inbox.look() == []


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x91\x01", b"\x90" * 5])
def test_a_broken_command_file_is_ignored(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    assert Inbox(tmp_path).look() == []


def test_the_feeder_writes_the_ring_before_the_exit(tmp_path):
    class Step:
        def __init__(self, step, value):
            self.step, self.value = step, value

        def write(self, records):
            records.add_layers(self.step, 0.0, LAYERS, row(self.value))
            records.ring.end_step(self.step, skipped=False)

    from gradiometer.reports import EventReport

    run = wire.RunInfo(run_id="r", project="p", name="n", created_s=0.0)
    writer = spool_module.open_source(tmp_path, run, wire.SourceInfo(rank=0, attempt=1))
    feeder = Feeder(writer, Drops(), lambda: None)
    for step in range(1, 31):
        feeder.put(Step(step, float("inf") if step == 27 else 1.0))
    feeder.put_essential(EventReport(kind="exit", time=0.0, attributes={"code": 0}))
    assert feeder.close(10)
    out = recorded(writer.directory)
    assert out.stream[-1][0] == "exit"
    assert [step for one in out.details for step in one.steps] == list(range(1, 31))
