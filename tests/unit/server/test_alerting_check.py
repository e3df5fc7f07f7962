"""Rule check: what the agent has proved becomes one episode per check, with the agent's own words."""

from __future__ import annotations

from typing import Any

import pytest

from gradiometer import wire
from gradiometer_server.alerting.engine import AlertEngine
from gradiometer_server.alerting.explain import explain
from gradiometer_server.domain.alerts import EpisodeState, Severity
from gradiometer_server.domain.folded import FoldedEvent
from gradiometer_server.ingest.checks import record_fault
from tests.unit.server.alerting_timeline import event, healthy, only, run

SAID = {
    "check": "missing_zero_grad",
    "watch": "",
    "title": "Gradients are not cleared between optimizer steps",
    "text": "What happened, and why it matters.",
    "advice": "Call optimizer.zero_grad().",
    "severity": "error",
    "metric": "grad/norm",
    "count": 1,
    "facts": {"old_gradient_abs_max": 0.25, "names": ["a", "b"]},
}


def said(step: int, *, rank: int = 0, attempt: int = 1, **changed: Any) -> FoldedEvent:
    return event(step, "check", rank=rank, attempt=attempt, **{**SAID, **changed})


def test_the_words_are_the_agents() -> None:
    episode = only([*healthy(1, 2), said(2)])
    assert (episode.first.rule, episode.first.key) == ("check", "missing_zero_grad")
    assert (episode.severity, episode.first.step, episode.first.metric) == (Severity.ERROR, 2, "grad/norm")
    text = explain(episode)
    assert text.title == SAID["title"]
    assert text.explanation == "What happened, and why it matters. First seen at step 2."
    assert text.advice == "Call optimizer.zero_grad()."
    assert "old_gradient_abs_max = 0.25" in episode.facts
    assert "names = a, b" in episode.facts


def test_it_stays_open_until_another_attempt_begins() -> None:
    items = [*healthy(1, 2), said(2), *healthy(3, 2000), said(2001, count=10), *healthy(2002, 2400)]
    episode = only(items)
    assert episode.state is EpisodeState.FIRING
    assert "True at least 10 times, up to step 2001." in explain(episode).explanation
    (resolved,) = run(
        [
            *items,
            *healthy(
                1,
                1,
            ),
        ]
    ).values()
    assert resolved.state is EpisodeState.FIRING
    (resolved,) = run([*items, event(0, "marker", attempt=2, name="resume")]).values()
    assert resolved.state is EpisodeState.RESOLVED


def test_checks_and_watches_are_episodes_of_their_own() -> None:
    found = run([said(2), said(2, watch="critic"), said(3, check="scaler_not_given"), said(3, rank=5)])
    assert [(one.first.key, one.ranks) for one in found.values()] == [
        ("missing_zero_grad", (0, 5)),
        ("missing_zero_grad critic", (0,)),
        ("scaler_not_given", (0,)),
    ]
    assert [explain(one).title.endswith("(critic)") for one in found.values()] == [False, True, False]


def test_a_replay_from_a_snapshot_writes_the_same_episode() -> None:
    engine = AlertEngine()
    (first,) = run([*healthy(1, 5), said(5)], engine).values()
    later = AlertEngine.restore(engine.snapshot(), [first])
    (again,) = run([said(50, count=10)], later).values()
    assert (again.alert_id, again.count, again.worst.value) == (first.alert_id, 2, 10.0)


def test_odd_attributes_still_arrive() -> None:
    odd = event(None, "check", check=None, title=3, severity="loud", facts=[1], count="many")
    episode = only([*healthy(1, 7), odd])
    assert (episode.first.step, episode.severity) == (7, Severity.WARNING)
    assert explain(episode).title
    assert explain(episode).advice


def test_a_good_check_event_is_accepted() -> None:
    assert record_fault(wire.Event(kind="check", time=1.0, step=2, attributes=dict(SAID)), {}) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"check": None}, "'check' is None"),
        ({"title": 3}, "'title' is 3"),
        ({"severity": None}, "'severity' is None"),
        ({"count": "10"}, "'count' is '10'"),
        ({"facts": [1]}, "expected dict or nothing"),
    ],
)
def test_a_bad_check_event_is_refused_with_the_reason(changed: dict[str, Any], expected: str) -> None:
    fault = record_fault(wire.Event(kind="check", time=1.0, step=2, attributes={**SAID, **changed}), {})
    assert fault is not None
    assert fault.code == "invalid_event"
    assert expected in fault.message
