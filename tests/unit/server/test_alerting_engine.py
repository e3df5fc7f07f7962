"""The engine: identities, restarts, attempts, late items; and what an explanation always says."""

from __future__ import annotations

import math

import pytest

from gradiometer_server.alerting.engine import AlertEngine
from gradiometer_server.alerting.explain import explain
from gradiometer_server.alerting.rules import make_rules
from gradiometer_server.domain.alerts import Breach, EpisodeState, Severity
from gradiometer_server.domain.folded import Folded
from tests.unit.server.alerting_timeline import event, healthy, healthy_step, layers, run, scalars

NAN = math.nan


def nan_step(step: int, attempt: int = 1) -> Folded:
    return scalars(step, {"train/loss": NAN}, attempt=attempt)


def test_a_new_attempt_resolves_what_fired_and_learns_afresh() -> None:
    engine = AlertEngine.restore([], [])
    found = run([*healthy(1, 80), nan_step(81), scalars(60, {"grad/norm": 50.0}, attempt=2)], engine)
    assert [(e.alert_id, e.state) for e in found.values()] == [("1-non_finite-81", EpisodeState.RESOLVED)]
    assert found["1-non_finite-81"].resolved_step == 81


def test_a_straggler_of_an_old_attempt_changes_nothing() -> None:
    engine = AlertEngine.restore([], [])
    assert run([scalars(1, {"train/loss": 1.0}, attempt=2), nan_step(9, attempt=1)], engine) == {}
    assert list(run([nan_step(2, attempt=2)], engine)) == ["2-non_finite-2"]


def test_a_second_incident_gets_its_own_identity() -> None:
    found = run([*healthy(1, 30), nan_step(31), *healthy(32, 60), nan_step(61)])
    assert list(found) == ["1-non_finite-31", "1-non_finite-61"]


def test_events_do_not_move_the_step_clock() -> None:
    found = run([*healthy(1, 30), nan_step(31), event(10_000, "alert", title="t"), *healthy(32, 40)])
    assert found["1-non_finite-31"].state is EpisodeState.FIRING


def test_a_firing_episode_survives_a_restart_and_keeps_its_count() -> None:
    engine = AlertEngine.restore([], [])
    found = run([*healthy(1, 30), nan_step(31), nan_step(32)], engine)
    again = AlertEngine.restore(engine.snapshot(), list(found.values()))
    assert run([nan_step(33)], again)["1-non_finite-31"].count == 3


def test_states_of_unknown_rules_and_versions_are_ignored() -> None:
    engine = AlertEngine.restore([], [])
    run(healthy(1, 80), engine)
    states = [
        (rule, key, data.replace(b"\xa7version\x01", b"\xa7version\x63"))
        for rule, key, data in engine.snapshot()
    ]
    assert states != engine.snapshot()
    fresh = AlertEngine.restore([*states, ("no_such_rule", "", b"?")], [])
    assert run(healthy_step(81, norm=50.0), fresh) == {}
    assert run(healthy_step(81, norm=50.0), engine) != {}


def test_a_snapshot_stays_small() -> None:
    engine = AlertEngine.restore([], [])
    run(healthy(1, 500, skipped=0.0), engine)
    assert sum(len(data) for _, _, data in engine.snapshot()) < 16_384


@pytest.mark.parametrize("rule", [*(rule.name for rule in make_rules()), "other"])
def test_every_explanation_says_something_even_without_details(rule: str) -> None:
    breach = Breach(rule=rule, severity=Severity.WARNING, step=7, time_s=0.0, metric="train/loss")
    text = explain(next(iter([_episode(breach)])))
    assert "7" in text.title + text.explanation
    assert text.title
    assert text.advice
    for part in (text.title, text.explanation, text.advice):
        assert "None" not in part
        assert "{" not in part or part is text.advice  # Advice may show code.


def test_an_explanation_tells_how_often_and_until_when() -> None:
    found = run([*healthy(1, 30), nan_step(31), nan_step(35), *healthy(36, 80)])
    text = explain(found["1-non_finite-31"]).explanation
    assert "2 times from step 31 to step 35" in text
    assert "quiet since" in text


def test_items_out_of_order_do_not_count_twice() -> None:
    items = [
        *healthy(1, 100),
        *healthy_step(101, norm=20.0),
        *healthy_step(101, norm=20.0),
        *healthy_step(50, norm=20.0),
    ]
    episode = run(items)["1-grad_norm_spike-101"]
    assert episode.count == 1


def test_layers_that_change_their_layout_start_afresh() -> None:
    from gradiometer_server.domain.folded import Layout

    other = Layout(layout_id=2, names=("a", "b"), numels=(1, 1))
    items: list[Folded] = [layers(step, zero=["head.weight"]) for step in range(1, 15)]
    items += [layers(step, [1.0, 1.0], layout=other, zero=["a"]) for step in range(15, 30)]
    assert run(items) == {}


def _episode(breach: Breach):  # type: ignore[no-untyped-def]
    from gradiometer_server.alerting.episodes import opened

    return opened(1, breach)
