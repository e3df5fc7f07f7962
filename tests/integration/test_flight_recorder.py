"""The flight recorder saves the step that goes wrong, whole and bounded; `gradiometer replay` names the operation."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gradiometer as gm
from gradiometer import replay as run_replay
from gradiometer.capture import dump
from tests.integration import flight_training
from tests.support.eventually import eventually
from tests.support.recorded import recorded

ROOT = Path(__file__).resolve().parents[2]
BAD_STEP = flight_training.BAD_STEP


def dumps_in(folder):
    return sorted(path for path in folder.rglob("step-*") if path.is_dir())


def replay(*arguments):
    command = [sys.executable, "-m", "gradiometer", "replay", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def opened(tmp_path, spool):
    with gm.init(mode="offline", run_id="flight", flight_recorder=tmp_path / "dumps") as run:
        yield run


@pytest.fixture
def one_dump(tmp_path, opened):
    flight_training.train(opened)
    (folder,) = dumps_in(tmp_path / "dumps")
    return folder


def test_the_state_before_the_bad_update_is_saved_with_batch_and_generators(tmp_path, opened):
    kept = {}

    def before_step(step, model, optimizer):
        if step == BAD_STEP:
            kept.update(
                model=copy.deepcopy(model.state_dict()), optimizer=copy.deepcopy(optimizer.state_dict())
            )

    flight_training.train(opened, before_step=before_step)
    (folder,) = dumps_in(tmp_path / "dumps")
    assert folder == tmp_path / "dumps" / "flight" / f"step-{BAD_STEP:08d}"
    manifest = dump.read_manifest(folder)
    assert (manifest.step, manifest.trigger, manifest.batch, manifest.world_size) == (
        BAD_STEP,
        "output",
        "recorded",
        1,
    )
    assert manifest.left_out == {}
    state = dump.read_state(folder, tmp_path)
    assert list(state["model"]) == list(kept["model"])
    assert all(torch.equal(state["model"][name], value) for name, value in kept["model"].items())
    moments = kept["optimizer"]["state"]
    assert all(
        torch.equal(state["optimizers"]["0"]["state"][i]["exp_avg_sq"], moments[i]["exp_avg_sq"])
        for i in moments
    )
    (batch,) = dump.read_rank(folder, 0)["batches"]
    assert torch.equal(batch["x"], flight_training.batch_of(BAD_STEP)["x"])
    out = recorded(opened.directory)
    opened._feeder.flush(10)
    out = recorded(opened.directory)
    (event,) = out.of_kind("dump")
    assert event.step == BAD_STEP
    assert (event.attributes["path"], event.attributes["rank"]) == (str(folder), 0)
    assert event.attributes["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert opened.failures == {}


def test_replay_names_the_operation_that_overflowed(one_dump):
    code, out, err = replay(one_dump, "--with", "tests.integration.flight_training:build")
    assert code == 0, out + err
    assert f"step {BAD_STEP} of run flight: a gradient and the model's output are not finite on rank 0" in out
    assert "reproduced: the loss is not finite" in out
    assert "first operation: aten.exp.default, forward, in sharpen" in out
    assert "flight_training.py" in out
    assert "scores = torch.exp(x)" in out
    assert "output: float32 [8, 16]: from" in out
    assert "infinite" in out


def test_replay_says_when_the_step_is_fine_and_when_it_cannot_run(one_dump, tmp_path, capsys):
    program = "tests.integration.flight_training"
    assert run_replay.main([str(one_dump), "--with", f"{program}:build_without_overflow"]) == 1
    assert "not reproduced" in capsys.readouterr().out
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    for arguments, said in (
        ((one_dump, "--with", f"{program}:build_another"), "do not fit the model"),
        ((one_dump, "--with", f"{program}:build_nothing"), "must return (model, optimizer or None, step)"),
        ((one_dump, "--with", f"{program}:missing"), "has no missing"),
        ((one_dump, "--with", "no.such.module:build"), "cannot be imported"),
        ((one_dump, "--with", "build"), "module:function"),
        ((one_dump, "--with", f"{program}:build", "--rank", "3"), "1 ranks"),
        ((tmp_path, "--with", f"{program}:build"), "is no dump"),
        ((broken, "--with", f"{program}:build"), "is damaged"),
    ):
        assert run_replay.main([str(argument) for argument in arguments]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run_replay.main([str(one_dump)])


def test_without_record_batch_what_the_forward_was_called_with_is_saved(tmp_path, opened):
    flight_training.train(opened, record=False)
    (folder,) = dumps_in(tmp_path / "dumps")
    assert dump.read_manifest(folder).batch == "forward"
    (seen,) = dump.read_rank(folder, 0)["batches"]
    assert torch.equal(seen["args"][0], flight_training.batch_of(BAD_STEP)["x"])
    code, out, err = replay(folder, "--with", "tests.integration.flight_training:build_from_forward")
    assert code == 0, out + err
    assert "aten.exp.default, forward, in sharpen" in out


def test_dumps_are_bounded_and_trouble_that_goes_on_is_one(tmp_path, spool, monkeypatch):
    monkeypatch.setenv("GRADIOMETER_FLIGHT_RECORDER", str(tmp_path / "dumps"))
    with gm.init(mode="offline", run_id="many") as run:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.watch(model, optimizer)
        for step in range(1, 201):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            if step in (30, 31, 32, 80, 140, 190):
                model.weight.grad[0, 0] = float("nan")
                saved = model.weight.detach().clone()
            optimizer.step()
            with torch.no_grad():
                model.weight.copy_(saved) if step > 30 else None
    assert [path.name for path in dumps_in(tmp_path / "dumps")] == ["step-00000030", "step-00000080"]


def test_under_a_scaler_a_skipped_step_is_no_dump_but_a_bad_loss_is(tmp_path, opened):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opened.watch(model, optimizer, scaler)
    for step in range(1, 31):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum() * (float("nan") if step == 25 else 1.0)
        opened.log({"train/loss": loss})
        scaler.scale(loss).backward()
        if step == 5:
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    (folder,) = dumps_in(tmp_path / "dumps")
    assert (folder.name, dump.read_manifest(folder).trigger) == ("step-00000025", "loss")
    assert dump.read_rank(folder, 0)["scaler"]["scale"] > 0


def test_the_training_ends_with_the_same_bits_and_nothing_stays_on_the_model(tmp_path, spool):
    weights = []
    for recorder in (None, tmp_path / "dumps"):
        with gm.init(mode="offline", run_id=f"bits{len(weights)}", flight_recorder=recorder) as run:
            model, _ = flight_training.train(run, steps=BAD_STEP - 1)
            pickled = copy.deepcopy(model)
        assert not model._forward_pre_hooks
        assert pickled(torch.zeros(1, 4)).shape == (1, 3)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    assert dumps_in(tmp_path / "dumps") == []


def test_generators_are_restored_to_the_bit():
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    state = dump.random_state()
    drawn = [random.random(), np.random.normal(), torch.randn(3)]
    dump.restore_random_state(state)
    again = [random.random(), np.random.normal(), torch.randn(3)]
    assert drawn[:2] == again[:2]
    assert torch.equal(drawn[2], again[2])


def test_what_is_no_plain_value_is_left_out_and_named(tmp_path):
    left_out: dict[str, str] = {}
    given = {
        "x": torch.ones(3)[1:],
        "n": np.float32(2.5),
        "who": object(),
        "ids": ("a", 1, None),
        3: [{1, 2}],
    }
    found = dump.plain(given, left_out, "batch")
    assert set(left_out) == {"batch.who", "batch.3[0]"}
    assert found["x"].untyped_storage().nbytes() == 8, "not the whole storage behind a view"
    torch.save(found, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert (loaded["ids"], loaded["n"].item()) == (("a", 1, None), 2.5)


def test_a_folder_that_cannot_be_written_costs_the_dump_and_nothing_else(tmp_path, spool):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with gm.init(mode="offline", run_id="blocked", flight_recorder=blocker) as run:
        flight_training.train(run)
        assert run.failures == {}
        run._feeder.flush(10)
        reasons = recorded(run.directory).unavailable()
    assert "could not be saved" in reasons["flight recorder"]


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [(None, None, None), (None, "0", None), (None, "1", "gradiometer-dumps"), (False, "1", None), (True, None, "gradiometer-dumps"),
     ("some/where", None, "some/where"), (None, "else", "else")],
)  # fmt: skip
def test_the_folder_is_the_argument_or_the_variable(given, variable, expected, monkeypatch, tmp_path):
    from gradiometer import settings

    monkeypatch.chdir(tmp_path)
    if variable is not None:
        monkeypatch.setenv("GRADIOMETER_FLIGHT_RECORDER", variable)
    found = settings._flight_recorder(given)
    assert found == (None if expected is None else tmp_path / expected)


def test_wrong_settings_are_errors_of_init(spool, monkeypatch):
    with pytest.raises(ValueError, match="flight_recorder 7 is not a folder"):
        gm.init(mode="offline", flight_recorder=7)
    monkeypatch.setenv("GRADIOMETER_FLIGHT_DUMPS", "lots")
    with pytest.raises(ValueError, match="GRADIOMETER_FLIGHT_DUMPS is 'lots'"):
        gm.init(mode="offline")


def test_the_server_asks_for_a_dump_when_a_critical_alert_opens(tmp_path, spool, server, monkeypatch):
    one = server()
    monkeypatch.setenv("GRADIOMETER_URL", one.url)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gm.init(run_id="asked", flight_recorder=tmp_path / "dumps") as run:
        run.watch(model, optimizer)
        run.alert("the evaluation is worthless", severity="critical")

        def saved():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            optimizer.step()
            run.log({"train/loss": loss})
            return one.get("/runs/asked")["dumps"]

        (found,) = eventually(saved, 30, what="the dump that the server asked for")
    assert (found["reason"], found["rank"], found["attempt"]) == ("the server asked for it", 0, 1)
    assert dump.read_manifest(Path(found["path"])).trigger == "server"
