"""The parts that all integrations share: a stand-in for a method, the mean of losses, and whose run it is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import gradiometer as gm
from gradiometer import limits
from gradiometer.integrations.losses import LossWindow
from gradiometer.integrations.session import Session, merged
from gradiometer.integrations.substitute import Substitute


class Owner:
    def step(self, value, *, factor=1):
        """Multiplies."""
        if value < 0:
            raise ValueError("negative")
        return value * factor


@pytest.fixture
def seen():
    return []


@pytest.fixture
def around(seen):
    def call(original, *args, **kwargs):
        seen.append(args)
        return original(*args, **kwargs)

    return call


def test_a_substitute_passes_everything_on_and_gives_the_method_back(seen, around):
    owner, other = Owner(), Owner()
    substitute = Substitute(owner, "step", around)
    assert owner.step(2, factor=3) == 6
    with pytest.raises(ValueError, match="negative"):
        owner.step(-1)
    assert other.step(4) == 4
    assert seen == [(2,), (-1,)]
    assert owner.step.__doc__ == "Multiplies."
    substitute.remove()
    assert vars(owner) == {}
    assert owner.step(5) == 5
    assert len(seen) == 2


def test_a_method_that_the_instance_had_itself_comes_back(around):
    owner = Owner()
    own = owner.step = lambda value: value + 1
    substitute = Substitute(owner, "step", around)
    assert owner.step(1) == 2
    substitute.remove()
    assert owner.step is own


def test_under_another_wrapper_it_only_stops_looking(seen, around):
    owner = Owner()
    substitute = Substitute(owner, "step", around)
    inner = owner.step
    owner.step = lambda value: inner(value)
    substitute.remove()
    assert owner.step(3) == 3
    assert seen == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_a_copy_of_the_owner_has_the_plain_method(seen, around, copied):
    owner = Owner()
    Substitute(owner, "step", around)
    assert copied(owner).step(3) == 3
    assert seen == []


def test_the_mean_of_losses_keeps_no_graph_and_rounds_like_float32():
    window = LossWindow()
    assert window.take(mean=True) is None
    weight = torch.ones((), requires_grad=True)
    for value in (1.0, 2.0, 4.0):
        window.add((weight * value).to(torch.bfloat16).reshape(1))
    window.add(None)
    window.add(torch.ones(2))
    mean = window.take(mean=True)
    assert mean.dtype == torch.float32
    assert not mean.requires_grad
    assert mean.item() == pytest.approx(7 / 3)
    window.add(weight * 3, factor=2)
    assert window.take(mean=False).item() == 6
    assert window.take(mean=False) is None


def test_a_loss_that_is_changed_in_place_later_is_not_changed_here():
    window, loss = LossWindow(), torch.tensor(1.0)
    window.add(loss)
    loss += 5
    assert window.take(mean=False).item() == 1


def test_the_users_run_is_used_and_an_integrations_run_is_not(spool, monkeypatch):
    monkeypatch.setenv("GRADIOMETER_MODE", "offline")
    first, second = Session(None, {}), Session(None, {"config": {"a": 1}})
    own = first.open(config={}, project="framework")
    assert second.open(config={"b": 2}) is not own, "another integration opened it, for another training"
    assert second.run.config == {"b": 2, "a": 1}
    second.finish()
    with gm.init() as run:
        assert first.open(config={}) is run
        assert Session(run, {}).open(config={}) is run
        first.fail(RuntimeError("not ours to end"))
        first.finish()
        assert gm.run.current() is run


def test_what_the_user_says_wins(spool, monkeypatch):
    monkeypatch.setenv("GRADIOMETER_MODE", "offline")
    session = Session(None, {"run_id": "mine", "start_step": 3})
    assert session.open(config={}, start_step=9, saved_id="saved", new_id="new").id == "mine"
    assert session.run.step == 3
    session.finish()
    for named, expected in ((None, "saved"), ("from-environment", "from-environment")):
        if named:
            monkeypatch.setenv("GRADIOMETER_RUN_ID", named)
        session = Session(None, {})
        assert session.open(config={}, saved_id="saved", new_id="new").id == expected
        session.finish()


def test_how_a_run_is_found_is_left_to_the_user_who_says_so(spool, monkeypatch):
    monkeypatch.setenv("GRADIOMETER_MODE", "offline")
    for resume, expected in (("never", None), ("allow", "saved")):
        session = Session(None, {"resume": resume})
        found = session.open(config={}, saved_id="saved", new_id="new").id
        assert found not in ("saved", "new") if expected is None else found == expected
        session.finish()


def test_a_config_that_is_none_is_told():
    assert merged({"a": 1, "b": 1}, {"b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="config is a int"):
        merged({}, 3)


def test_settings_of_a_framework_that_are_too_large_are_cut(spool):
    session = Session(None, {"config": {"mine": 1}, "mode": "offline"})
    labels = {"id2label": {str(index): "a label of a class" * 10 for index in range(20_000)}, "lr": 0.1}
    run = session.open(config=labels, name="two\nlines")
    assert run.config == {"lr": 0.1, "mine": 1, limits.LEFT_OUT: ["id2label"]}
    session.finish()
