"""Trains one small model on every rank with each framework in turn, and says which run and folder each used.

Started by torchrun from `test_integration_ranks.py`, which reads the spools of all ranks afterwards.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

STEPS, BATCH, FEATURES = 3, 2, 4


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))


def rows() -> torch.Tensor:
    """As many as two ranks need for all steps."""
    return torch.randn(STEPS * BATCH * 2, FEATURES, generator=torch.Generator().manual_seed(5))


def loss_of(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (net(batch) - 10 * batch.sum(1, keepdim=True)).square().mean()


class ForTrainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, values):
        return {"loss": loss_of(self.net, values)}


def with_transformers(folder: Path):
    from transformers import Trainer, TrainingArguments

    from gradiometer.integrations.transformers import GradiometerCallback

    callback = GradiometerCallback(name="transformers")
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="steps",
        save_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        max_grad_norm=0.5,
        remove_unused_columns=False,
    )
    data = [{"values": row} for row in rows()]
    Trainer(model=ForTrainer(), args=arguments, train_dataset=data, callbacks=[callback]).train()
    run = callback.run
    callback.finish()
    return run


def with_accelerate(_folder: Path):
    from accelerate import Accelerator

    from gradiometer.integrations.accelerate import GradiometerTracker

    tracker = GradiometerTracker(name="accelerate")
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("unused", config={"lr": 0.1})
    net = network()
    batches = torch.utils.data.DataLoader(rows(), batch_size=BATCH)
    net, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), batches)
    tracker.watch(accelerator, net, optimizer)
    run = tracker.tracker
    for batch in batches:
        accelerator.backward(loss_of(net, batch))
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"global": 1.0})
    tracker.finish()
    return run


def with_lightning(folder: Path):
    import lightning.pytorch as pl

    from gradiometer.integrations.lightning import GradiometerCallback, GradiometerLogger

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            loss = loss_of(self.net, batch)
            self.log("global", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    logger = GradiometerLogger(name="lightning")
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        gradient_clip_val=0.5,
        logger=logger,
        callbacks=[GradiometerCallback()],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=str(folder),
    ).fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=BATCH))
    run = logger.session.run
    logger.finish()
    return run


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    said = {}
    for train in (with_transformers, with_accelerate, with_lightning):
        run = train(folder)
        said[train.__name__.removeprefix("with_")] = {
            "run_id": run.id,
            "directory": str(run.directory),
            "failures": run.failures,
            "dropped": run.dropped,
            "step": run.step,
        }
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(said))
    # None of the three does it, and without it torch now and then aborts a process that ends.
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
