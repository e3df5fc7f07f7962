"""The shortest loop that is worth watching: fits a small network to a sine."""

from __future__ import annotations

import torch

import gradiometer as gm


def main() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with gm.init(project="examples", name="minimal", config={"lr": 1e-2, "hidden": 64}) as run:
        run.watch(model, optimizer)
        for _ in range(300):
            inputs = torch.rand(256, 1) * 6 - 3
            loss = torch.nn.functional.mse_loss(model(inputs), torch.sin(inputs))
            run.log({"train/loss": loss})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
