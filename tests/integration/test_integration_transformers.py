"""The Hugging Face Trainer with the callback: same weights, raw losses, one point per optimizer step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import gradiometer as gm
from tests.integration.framework_runs import digest, finished, marks, norms
from tests.support.eventually import eventually

with warnings.catch_warnings():
    # What the library and what it imports deprecate while they are imported is not our business.
    warnings.simplefilter("ignore")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from gradiometer.integrations import transformers as module
    from gradiometer.integrations.transformers import GradiometerCallback, metric_name

VOCABULARY, LENGTH = 31, 8


@pytest.fixture(autouse=True)
def ours(spool, monkeypatch):
    monkeypatch.setenv("GRADIOMETER_MODE", "offline")
    return spool


def tiny_gpt2(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=16,
            n_layer=2,
            n_head=2,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    # The first token is predicted by nothing; said so, everybody divides by the same number of tokens.
    labels = tokens.index_fill(1, torch.tensor([0]), -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def trainer_of(model, folder, callbacks, *, count=64, trainer=Trainer, compute_loss_func=None, **arguments):
    defaults = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        "learning_rate": 1e-3,
    }
    return trainer(
        model=model,
        args=TrainingArguments(**{**defaults, **arguments}),
        train_dataset=samples(count),
        eval_dataset=samples(8),
        callbacks=callbacks,
        compute_loss_func=compute_loss_func,
    )


def reference(batch_size, accumulation, steps, *, clip):
    """The same training as a plain loop: per step the mean loss, and the norm before clipping."""
    model = tiny_gpt2(dropout=0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses, found = [], []
    rows = torch.stack([sample["input_ids"] for sample in samples(64)])
    batches = iter(rows.split(batch_size))
    for _ in range(steps):
        total = 0.0
        for _ in range(accumulation):
            batch = next(batches)
            loss = model(input_ids=batch, labels=batch).loss / accumulation
            loss.backward()
            total += loss.item()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, found


class InOrder(Trainer):
    """Takes the samples in order."""

    def _get_train_sampler(self, *_args, **_kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (2, 4)])
def test_numbers_equal_those_of_a_plain_loop(tmp_path, batch_size, accumulation):
    callback = GradiometerCallback(project="reference", name="tiny", config={"mine": 7})
    trainer = trainer_of(
        tiny_gpt2(dropout=0.0),
        tmp_path,
        [callback],
        trainer=InOrder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
    )
    trainer.train()
    config = callback.run.config
    out = finished(callback.run)
    losses, expected = reference(batch_size, accumulation, 6, clip=0.5)
    assert list(out.points["train/loss"]) == [1, 2, 3, 4, 5, 6]
    assert list(out.points["train/loss"].values()) == pytest.approx(losses, rel=1e-5)
    assert list(norms(out).values()) == pytest.approx(expected, rel=1e-5)
    assert list(out.points["grad/clip_norm"].values()) == pytest.approx(expected, rel=1e-5)
    assert max(expected) > 0.5, "nothing was clipped, so the moment of reading was not tested"
    assert out.points["train/logged_loss"][2] == pytest.approx(sum(losses[:2]) / 2, rel=1e-4)
    assert out.points["train/learning_rate"][4] == pytest.approx(1e-3)
    assert (config["mine"], config["training"]["max_steps"], config["model"]["n_embd"]) == (7, 6, 16)


def test_weights_are_bit_identical_with_the_callback(tmp_path):
    def train(callbacks):
        torch.manual_seed(11)
        trainer = trainer_of(
            tiny_gpt2(),
            tmp_path,
            callbacks,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=3,
        )
        trainer.train()
        return digest(trainer.model), trainer.state.log_history

    callback = GradiometerCallback()
    watched, history = train([callback])
    finished(callback.run)
    bare, bare_history = train([])
    assert watched == bare
    for line, bare_line in zip(history, bare_history, strict=True):
        assert line.keys() == bare_line.keys()
        assert line.get("loss") == bare_line.get("loss")


class Poisoned(InOrder):
    """The loss of step 10 is NaN, and with it all weights from then on."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss = super().compute_loss(model, inputs, return_outputs, **options)
        return loss * float("nan") if self.state.global_step == 9 else loss


def test_R14_a_loss_that_is_not_finite_is_told_at_its_step_though_the_trainer_hides_it(tmp_path):
    callback = GradiometerCallback()
    trainer = trainer_of(
        tiny_gpt2(), tmp_path, [callback], trainer=Poisoned, max_steps=14, logging_steps=1, max_grad_norm=0.0
    )
    trainer.train()
    out = finished(callback.run)
    losses = out.points["train/loss"]
    assert next(step for step, loss in losses.items() if loss != loss) == 10
    assert list(losses) == list(range(1, 15))
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == 14
    assert all(loss == loss for loss in logged), (
        "the trainer no longer hides it: take this test for what it was"
    )
    assert all(out.points["train/logged_loss"][step] == logged[step - 1] for step in range(1, 15))


@pytest.mark.slow
def test_R14_the_alert_is_of_the_step_itself(tmp_path, server, monkeypatch):
    running = server()
    monkeypatch.setenv("GRADIOMETER_MODE", "online")
    monkeypatch.setenv("GRADIOMETER_URL", running.url)
    callback = GradiometerCallback()
    trainer_of(
        tiny_gpt2(), tmp_path, [callback], trainer=Poisoned, max_steps=14, logging_steps=1, max_grad_norm=0.0
    ).train()
    callback.finish()

    def alerted():
        alerts = running.get(f"/runs/{callback.run.id}/alerts")["alerts"]
        critical = [alert for alert in alerts if alert["severity"] == "critical"]
        assert [(alert["metric"], alert["first_step"]) for alert in critical] == [("train/loss", 10)]
        return True

    eventually(alerted, 30)


class Accepts(nn.Module):
    """A model of no library: takes no `num_items_in_batch`, so that the Trainer divides by the micro-batches."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(LENGTH, 1)

    def forward(self, input_ids, labels):
        del labels
        return {"loss": self.head(input_ids / VOCABULARY).square().mean()}


def own_loss(outputs, labels, num_items_in_batch):
    logits = outputs["logits"][:, :-1]
    total = nn.functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), reduction="sum"
    )
    return total / num_items_in_batch


@pytest.mark.parametrize("kind", ["counts_tokens", "no_library", "own_loss"])
def test_R15_the_loss_does_not_depend_on_the_accumulation(tmp_path, kind):
    found = {}
    for accumulation in (1, 8, 32):
        torch.manual_seed(2)
        callback = GradiometerCallback()
        trainer = trainer_of(
            Accepts() if kind == "no_library" else tiny_gpt2(dropout=0.0),
            tmp_path,
            [callback],
            count=96,
            trainer=InOrder,
            compute_loss_func=own_loss if kind == "own_loss" else None,
            per_device_train_batch_size=32 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
        )
        trainer.train()
        out = finished(callback.run)
        assert list(out.points["train/loss"]) == list(norms(out)) == [1, 2, 3]
        found[accumulation] = (list(out.points["train/loss"].values()), list(norms(out).values()))
    for accumulation in (8, 32):
        for one, other in zip(found[1], found[accumulation], strict=True):
            assert other == pytest.approx(one, rel=1e-3)


def test_a_last_window_of_fewer_micro_batches_is_a_mean_too(tmp_path):
    callback = GradiometerCallback()
    trainer = trainer_of(
        Accepts(),
        tmp_path,
        [callback],
        count=5,
        trainer=InOrder,
        max_steps=-1,
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        learning_rate=0.0,
    )
    trainer.train()
    out = finished(callback.run)
    with torch.no_grad():
        each = [float(trainer.model(sample["input_ids"], None)["loss"]) for sample in samples(5)]
    assert out.points["train/loss"] == pytest.approx({1: sum(each[:3]) / 3, 2: sum(each[3:]) / 2}, rel=1e-5)


def test_evaluations_and_checkpoints_are_marked_and_named(tmp_path):
    callback = GradiometerCallback()
    trainer = trainer_of(
        tiny_gpt2(),
        tmp_path,
        [callback],
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        per_device_eval_batch_size=2,
    )
    trainer.train()
    trainer.evaluate(metric_key_prefix="test")
    assert callback.run.step == 6
    out = finished(callback.run)
    assert list(out.points["eval/loss"]) == [3, 6]
    assert out.points["eval/loss"][3] == trainer.state.log_history[1]["eval_loss"]
    assert list(out.points["test/loss"]) == [6], "what comes after the training is lost"
    assert marks(out) == [
        ("evaluation", 3),
        ("checkpoint", 3),
        ("evaluation", 6),
        ("checkpoint", 6),
        ("evaluation", 6),
    ]
    assert out.points["train/train_loss"][6] > 0
    assert [event.attributes["code"] for event in out.of_kind("exit")] == [0]


def test_a_resumed_training_goes_on_in_the_same_run(tmp_path):
    first = GradiometerCallback()
    trainer_of(tiny_gpt2(), tmp_path, [first], save_strategy="steps", save_steps=2, max_steps=4).train()
    before = finished(first.run)
    assert list(before.points["train/loss"]) == [1, 2, 3, 4]

    second = GradiometerCallback()
    trainer_of(tiny_gpt2(), tmp_path, [second]).train(
        resume_from_checkpoint=str(tmp_path / "out/checkpoint-4")
    )
    assert second.run.id == first.run.id
    assert second.run.directory != first.run.directory
    after = finished(second.run)
    assert list(after.points["train/loss"]) == list(norms(after)) == [5, 6]

    other = GradiometerCallback(continue_run=False)
    trainer_of(tiny_gpt2(), tmp_path, [other]).train(
        resume_from_checkpoint=str(tmp_path / "out/checkpoint-4")
    )
    assert other.run.id != first.run.id
    assert list(finished(other.run).points["train/loss"]) == [5, 6]


def test_an_exception_fails_the_run_and_everything_is_given_back(tmp_path):
    class Broken(Trainer):
        def compute_loss(self, *args, **options):
            if self.state.global_step == 2:
                raise RuntimeError("the third step breaks")
            return super().compute_loss(*args, **options)

    callback = GradiometerCallback()
    trainer = trainer_of(tiny_gpt2(), tmp_path, [callback], trainer=Broken)
    with pytest.raises(RuntimeError, match="the third step breaks"):
        trainer.train()
    out = finished(callback.run)
    assert out.of_kind("exception")[0].attributes["message"] == "the third step breaks"
    assert out.of_kind("exit")[0].attributes["code"] == 1
    assert not {"training_step", "_run_epoch"} & vars(trainer).keys()
    assert not trainer.optimizer.optimizer._optimizer_step_pre_hooks


def test_a_run_of_the_users_is_used_and_left_open(tmp_path):
    with gm.init() as run:
        for _ in range(2):
            trainer_of(tiny_gpt2(), tmp_path, [GradiometerCallback()], max_steps=3).train()
        assert run.step == 6
        run.log({"mine": 1.0})
    assert run.failures == {}
    out = finished(run)
    assert list(out.points["train/loss"]) == list(norms(out)) == [1, 2, 3, 4, 5, 6]
    assert out.points["mine"] == {6: 1.0}


def test_each_training_has_a_run_of_its_own(tmp_path):
    callback = GradiometerCallback()
    trainer = trainer_of(tiny_gpt2(), tmp_path, [callback], max_steps=2)
    trainer.train()
    first = callback.run
    trainer.train()
    assert callback.run is not first
    for run in (first, callback.run):
        assert list(finished(run).points["train/loss"]) == [1, 2]


def test_a_trainer_that_cannot_be_found_is_said_and_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_calling_trainer", lambda _callback: None)
    lost, named = GradiometerCallback(), GradiometerCallback()
    trainer_of(tiny_gpt2(), tmp_path, [lost], max_steps=2).train()
    trainer = trainer_of(tiny_gpt2(), tmp_path, [named], max_steps=2)
    named.attach(trainer)
    trainer.train()
    out = finished(lost.run)
    assert "train/loss" not in out.points
    assert "callback.attach(trainer)" in out.unavailable()["train/loss"]
    assert list(norms(out)) == [1, 2]
    assert list(finished(named.run).points["train/loss"]) == [1, 2]


def test_a_run_that_does_nothing_changes_nothing(tmp_path):
    callback = GradiometerCallback(mode="disabled")
    trainer = trainer_of(tiny_gpt2(), tmp_path, [callback], max_steps=2)
    trainer.train()
    assert callback.run.id == ""
    assert "gradiometer" not in trainer.state.stateful_callbacks


def test_mistakes_are_told_when_the_callback_is_made(spool):
    with pytest.raises(TypeError, match="projekt"):
        GradiometerCallback(projekt="typo")
    with pytest.raises(TypeError, match="forwards"):
        GradiometerCallback(watch={"forwards": True})
    with pytest.raises(TypeError, match="pass what gradiometer"):
        GradiometerCallback("my project")
    with gm.init() as run, pytest.raises(ValueError, match="project would have no effect"):
        GradiometerCallback(run, project="late")


def test_names_of_what_the_trainer_logs():
    names = [
        "loss",
        "grad_norm",
        "eval_loss",
        "eval_set_a_loss",
        "test_runtime",
        "train_runtime",
        "epoch",
        "a/b",
    ]
    assert [metric_name(name) for name in names] == [
        "train/logged_loss",
        "train/grad_norm",
        "eval/loss",
        "eval/set_a_loss",
        "test/runtime",
        "train/train_runtime",
        "train/epoch",
        "a/b",
    ]
