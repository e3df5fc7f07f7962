"""Lightning: a logger for hyperparameters and metrics, a callback for gradients. Needs `pip install lightning`."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from gradiometer.integrations.lightning import GradiometerCallback, GradiometerLogger


class Sine(pl.LightningModule):
    def __init__(self, hidden: int = 64, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        return torch.nn.functional.mse_loss(self.net(inputs), torch.sin(inputs))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def loader(count: int) -> torch.utils.data.DataLoader:
    rows = torch.utils.data.TensorDataset(torch.rand(count, 1) * 6 - 3)
    return torch.utils.data.DataLoader(rows, batch_size=64)


def main() -> None:
    trainer = pl.Trainer(
        max_epochs=5,
        gradient_clip_val=1.0,
        logger=GradiometerLogger(project="examples", name="lightning_trainer"),
        callbacks=[GradiometerCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Sine(), loader(1280), loader(256))


if __name__ == "__main__":
    main()
