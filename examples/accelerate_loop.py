"""Accelerate: a tracker, and one line after `prepare`. Needs `pip install accelerate`."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from gradiometer.integrations.accelerate import GradiometerTracker


def main() -> None:
    tracker = GradiometerTracker(project="examples", name="accelerate_loop")
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with=tracker)
    accelerator.init_trackers("examples", config={"lr": 1e-2})

    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.utils.data.DataLoader(torch.rand(12_800, 1) * 6 - 3, batch_size=64)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    tracker.watch(accelerator, model, optimizer)
    for inputs in batches:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), torch.sin(inputs))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
