"""Gradient accumulation, a gradient scaler, clipping and a schedule: what is reported is per optimizer step.

The gradient norm on the page is that of the accumulated gradient, unscaled and before the clip, although nothing in the
loop says so.
"""

from __future__ import annotations

import torch

import gradiometer as gm

MICRO_BATCHES = 4
STEPS = 200


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    scaler = torch.amp.GradScaler(device)
    weights = torch.randn(32, 8, device=device)

    with gm.init(project="examples", name="accumulation", config={"micro_batches": MICRO_BATCHES}) as run:
        run.watch(model, optimizer, scaler=scaler)
        for _ in range(STEPS):
            for _ in range(MICRO_BATCHES):
                inputs = torch.randn(64, 32, device=device)
                with torch.autocast(device, dtype=dtype):
                    loss = torch.nn.functional.mse_loss(model(inputs), inputs @ weights)
                run.log_microbatch({"train/loss": loss})
                scaler.scale(loss / MICRO_BATCHES).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()


if __name__ == "__main__":
    main()
