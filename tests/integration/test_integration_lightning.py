"""Lightning with callback and logger: same weights, gradients before the clip, one point per optimizer step."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import gradiometer as gm
from tests.integration.framework_runs import digest, finished, marks, norms

with warnings.catch_warnings():
    # What the library and what it imports deprecate while they are imported is not our business.
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.precision import MixedPrecision

    from gradiometer.integrations.lightning import GradiometerCallback, GradiometerLogger

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

BATCH, COUNT = 4, 24


@pytest.fixture(autouse=True)
def ours(spool, monkeypatch):
    monkeypatch.setenv("GRADIOMETER_MODE", "offline")
    return spool


def data(count: int = COUNT, batch_size: int = BATCH):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 6, generator=generator)
    rows = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True) * 20)
    return torch.utils.data.DataLoader(rows, batch_size=batch_size)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


class Tiny(pl.LightningModule):
    def __init__(self, width: int = 16, optimizer: str = "AdamW"):
        super().__init__()
        self.save_hyperparameters()
        self.net = network()

    def loss(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("seen_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        return getattr(torch.optim, self.hparams.optimizer)(self.parameters(), lr=1e-2)


def trainer_of(folder, callbacks=(), logger=False, **options):
    defaults = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "default_root_dir": str(folder),
    }
    return pl.Trainer(callbacks=list(callbacks), logger=logger, **{**defaults, **options})


def reference(accumulation, clip, *, autocast=False):
    """The same training as a plain loop: per step the mean loss and the norm before clipping."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, found, batches = [], [], list(data())
    for start in range(0, len(batches), accumulation):
        window = batches[start : start + accumulation]
        each = []
        for inputs, targets in window:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.mse_loss(net(inputs), targets)
            # Lightning divides by this in a shorter last window too.
            (loss / accumulation).backward()
            each.append(loss.item())
        losses.append(sum(each) / len(each))
        found.append(nn.utils.clip_grad_norm_(net.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, found, net


@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_numbers_equal_those_of_a_plain_loop(tmp_path, accumulation, clip):
    callback = GradiometerCallback()
    trainer = trainer_of(tmp_path, [callback], accumulate_grad_batches=accumulation, gradient_clip_val=clip)
    module = Tiny()
    trainer.fit(module, data())
    out = finished(callback.run)
    losses, expected, net = reference(accumulation, clip)
    steps = list(range(1, len(losses) + 1))
    assert list(out.points["train/loss"]) == list(norms(out)) == steps
    assert list(out.points["train/loss"].values()) == pytest.approx(losses, rel=1e-5)
    assert list(norms(out).values()) == pytest.approx(expected, rel=1e-5)
    assert min(expected) > 10, "nothing was clipped, so the moment of reading was not tested"
    if clip is not None:
        assert list(out.points["grad/clip_norm"].values()) == pytest.approx(expected, rel=1e-5)
    assert digest(module.net) == digest(net)
    assert out.declared.keys() == {f"net.{place}.{kind}" for place in (0, 2) for kind in ("weight", "bias")}


@pytest.mark.parametrize("optimizer", ["AdamW", "LBFGS"])
def test_weights_are_bit_identical_with_the_integration(tmp_path, optimizer):
    def train(callbacks, logger):
        module = Tiny(optimizer=optimizer)
        trainer = trainer_of(tmp_path, callbacks, logger, max_epochs=2, val_check_interval=3)
        torch.manual_seed(0)
        trainer.fit(module, data(), data(8))
        return digest(module)

    logger = GradiometerLogger()
    watched = train([GradiometerCallback()], logger)
    out = finished(logger.session.run)
    assert list(norms(out)) == list(range(1, 13))
    assert watched == train([], False)


def test_mixed_precision_in_bfloat16(tmp_path):
    callback = GradiometerCallback()
    trainer = trainer_of(tmp_path, [callback], precision="bf16-mixed", gradient_clip_val=0.5)
    trainer.fit(Tiny(), data())
    out = finished(callback.run)
    losses, expected, _ = reference(1, 0.5, autocast=True)
    assert list(out.points["train/loss"].values()) == pytest.approx(losses, rel=1e-5)
    assert list(norms(out).values()) == pytest.approx(expected, rel=1e-5)


def test_mixed_precision_with_a_scaler_is_unscaled_and_skips(tmp_path):
    class Overflows(Tiny):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return loss * float("inf") if batch_idx == 2 else loss

    callback = GradiometerCallback()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    class InFloat32(MixedPrecision):
        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)

    plugin = InFloat32("16-mixed", "cpu", scaler)
    trainer = trainer_of(tmp_path, [callback], plugins=[plugin], gradient_clip_val=0.5)
    trainer.fit(Overflows(), data())
    out = finished(callback.run)
    _, expected, _ = reference(1, 0.5)
    assert list(norms(out).values())[:2] == pytest.approx(expected[:2], rel=1e-5)
    assert list(norms(out)) == [1, 2, 3, 4, 5, 6], "the skipped step is a step"
    assert out.points["scaler/skipped"] == {1: 0, 2: 0, 3: 1, 4: 0, 5: 0, 6: 0}
    assert out.points["scaler/scale"][4] == 512.0
    assert out.points["train/loss"][3] == float("inf")


class Pair(pl.LightningModule):
    """Manual optimization of two networks, each clipped and stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = network(), network()
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        sizes = []
        losses = []
        for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            loss = nn.functional.mse_loss(net(inputs), targets * (1 + len(losses)))
            optimizer.zero_grad()
            self.manual_backward(loss)
            sizes.append(nn.utils.get_total_norm([p.grad for p in net.parameters()]).item())
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            losses.append(loss)
        self.seen.append(tuple(sizes))
        self.last = [loss.item() for loss in losses]
        return losses[0]

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (self.first, self.second)]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_manual_optimization_of_two_networks_is_seen_before_the_clip(tmp_path, scaled):
    callback = GradiometerCallback()

    class InFloat32(MixedPrecision):
        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)

    plugins = [InFloat32("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if scaled else None
    module = Pair()
    trainer_of(tmp_path, [callback], plugins=plugins).fit(module, data())
    # Lightning unscales in `optimizer.step()`, so that clipping by hand before it is a mistake that is easy to make.
    out = finished(callback.run, mistakes=("clip_before_unscale",) if scaled else ())
    scale = 65536.0 if scaled else 1.0
    for index, prefix in enumerate(("first", "second")):
        rows = {name: row for name, row in out.layers.items() if f"{prefix}." in name}
        assert len(rows) == 4, list(out.layers)
        one = type(out)(layers=rows)
        expected = {step + 1: sizes[index] / scale for step, sizes in enumerate(module.seen)}
        assert norms(one) == pytest.approx(expected, rel=1e-5)
    assert min(module.seen[0]) > 10 * scale, "nothing was clipped, so the moment of reading was not tested"
    assert list(out.points["train/loss"]) == [1, 2, 3, 4, 5, 6]
    assert out.points["train/loss"][6] == pytest.approx(module.last[0])


def test_hyperparameters_metrics_evaluations_and_checkpoints(tmp_path):
    logger = GradiometerLogger(project="tests", name="tiny", config={"mine": 7})
    checkpoints = ModelCheckpoint(every_n_epochs=1)
    trainer = trainer_of(
        tmp_path, [GradiometerCallback(), checkpoints], logger, max_epochs=2, enable_checkpointing=True
    )
    module = Tiny()
    trainer.fit(module, data(), data(8))
    fitted = trainer.callback_metrics["val_loss"].item()
    trainer.test(module, data(8))
    run = logger.session.run
    assert run.config == {"mine": 7, "width": 16, "optimizer": "AdamW"}
    out = finished(run)
    assert list(out.points["val_loss"]) == [6, 12]
    assert out.points["val_loss"][12] == pytest.approx(fitted)
    assert list(out.points["test_loss"]) == [12], "what comes after the training is lost"
    assert out.points["seen_loss"] == pytest.approx(out.points["train/loss"], rel=1e-6)
    assert marks(out) == [
        ("evaluation", 6),
        ("checkpoint", 6),
        ("evaluation", 12),
        ("checkpoint", 12),
        ("evaluation", 12),
    ]
    assert logger.version == run.id
    assert f"tests/{run.id}/checkpoints" in checkpoints.best_model_path


def test_the_callback_alone_reports_metrics_too(tmp_path):
    callback = GradiometerCallback()
    trainer = trainer_of(tmp_path, [callback], max_epochs=2)
    trainer.fit(Tiny(width=3), data(), data(8))
    assert callback.run.config == {"width": 3, "optimizer": "AdamW"}
    out = finished(callback.run)
    assert list(out.points["val_loss"]) == [6, 12]
    assert marks(out) == [("evaluation", 6), ("evaluation", 12)]


def test_the_logger_alone_keeps_lightnings_steps(tmp_path):
    logger = GradiometerLogger(name="alone")
    trainer_of(tmp_path, [], logger).fit(Tiny(), data())
    run = logger.session.run
    assert run.config == {"width": 16, "optimizer": "AdamW"}
    assert list(finished(run).points["seen_loss"]) == [0, 1, 2, 3, 4, 5]


def test_the_experiment_is_the_run(tmp_path):
    class Asks(Tiny):
        def on_train_start(self):
            self.logger.experiment.log({"asked": 1.0})

    logger = GradiometerLogger()
    trainer_of(tmp_path, [], logger).fit(Asks(), data())
    assert logger.experiment is logger.session.run
    assert finished(logger.session.run).points["asked"] == {0: 1.0}


def test_a_resumed_training_goes_on_in_the_same_run(tmp_path):
    first = GradiometerCallback()
    trainer = trainer_of(tmp_path, [first])
    trainer.fit(Tiny(), data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert list(finished(first.run).points["train/loss"]) == [1, 2, 3, 4, 5, 6]

    second = GradiometerCallback()
    trainer_of(tmp_path, [second], max_epochs=2).fit(Tiny(), data(), ckpt_path=str(tmp_path / "one.ckpt"))
    assert second.run.id == first.run.id
    assert second.run.directory != first.run.directory
    after = finished(second.run)
    assert list(after.points["train/loss"]) == list(norms(after)) == [7, 8, 9, 10, 11, 12]


def test_an_exception_fails_the_run_and_everything_is_given_back(tmp_path):
    class Broken(Tiny):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise RuntimeError("the third step breaks")
            return super().training_step(batch, batch_idx)

    logger = GradiometerLogger()
    trainer = trainer_of(tmp_path, [GradiometerCallback()], logger)
    with pytest.raises(RuntimeError, match="the third step breaks"):
        trainer.fit(Broken(), data())
    out = finished(logger.session.run)
    assert out.of_kind("exception")[0].attributes["message"] == "the third step breaks"
    assert out.of_kind("exit")[0].attributes["code"] == 1
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


def test_a_run_of_the_users_is_used_and_left_open(tmp_path):
    with gm.init() as run:
        for _ in range(2):
            trainer_of(tmp_path, [GradiometerCallback()], GradiometerLogger()).fit(Tiny(), data())
        assert run.step == 12
        run.log({"mine": 1.0})
    out = finished(run)
    assert list(out.points["seen_loss"]) == list(norms(out)) == list(range(1, 13))
    assert out.points["mine"] == {12: 1.0}


def test_logger_and_callback_may_both_be_given_the_same_run(tmp_path):
    with gm.init() as run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer_of(tmp_path, [GradiometerCallback(run)], GradiometerLogger(run)).fit(Tiny(), data())
        assert run.step == 6
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer_of(tmp_path, [GradiometerCallback(run)], GradiometerLogger()).fit(Tiny(), data())
        assert run.step == 12
    out = finished(run)
    assert list(out.points["seen_loss"]) == list(norms(out)) == list(range(1, 13))


def test_logger_and_callback_with_different_runs_are_a_mistake(tmp_path):
    with gm.init(mode="disabled") as one:
        pass
    with gm.init() as other:
        trainer = trainer_of(tmp_path, [GradiometerCallback(one)], GradiometerLogger(other))
        with pytest.raises(ValueError, match="give run and options to the logger"):
            trainer.fit(Tiny(), data())


def test_mistakes_are_told(tmp_path):
    with pytest.raises(TypeError, match="projekt"):
        GradiometerLogger(projekt="typo")
    callback = GradiometerCallback(project="one")
    with pytest.raises(ValueError, match="give run and options to the logger"):
        trainer_of(tmp_path, [callback], GradiometerLogger(project="two")).fit(Tiny(), data())


OTHER_NAMESPACE = """
import warnings
warnings.simplefilter("ignore")
import sys
import torch
import pytorch_lightning as pl
from gradiometer.integrations.lightning import GradiometerCallback, GradiometerLogger
assert "lightning" not in sys.modules, "the other namespace was imported as well"
assert issubclass(GradiometerCallback, pl.Callback)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("seen", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

logger = GradiometerLogger()
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=logger, callbacks=[GradiometerCallback()],
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, log_every_n_steps=1)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=4))
print("steps", logger.session.run.step)
"""


@pytest.mark.slow
def test_the_other_namespace_is_served_too(tmp_path):
    command = [sys.executable, "-c", OTHER_NAMESPACE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "steps 2" in done.stdout
