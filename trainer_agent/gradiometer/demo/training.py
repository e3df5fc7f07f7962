"""The demo's training loop: the loop of a careful person, with everything that Gradiometer must cope with.

Gradient accumulation, GradScaler, unscaling before clipping, AdamW with decay for matrices only, warm-up and cosine.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gradiometer.demo.data import Text
from gradiometer.demo.faults import BAD_BATCH_WEIGHT, Fault, spoiled
from gradiometer.demo.model import LanguageModel, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings of one training; the defaults learn steadily, without a spike, on every seed that was tried."""

    steps: int = 600
    seed: int = 0
    batch: int = 8
    accumulation: int = 4
    peak_lr: float = 1.5e-3
    final_lr_fraction: float = 0.1
    warmup_steps: int = 40
    weight_decay: float = 0.1
    max_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One finished optimizer step. `loss` is the mean over its micro-batches; `norm` is before clipping."""

    step: int
    loss: Tensor
    norm: Tensor
    lr: float
    scale: float
    ended_s: float
    """Unix seconds at the return of the optimizer step."""


class Training:
    """Model, optimizer and scaler of the demo, and the steps that they take together."""

    def __init__(self, config: TrainingConfig, text: Text, fault: Fault | None = None) -> None:
        torch.manual_seed(config.seed)
        self.config, self._text, self._fault = config, text, fault
        self._generator = torch.Generator().manual_seed(config.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model_config = ModelConfig(vocabulary=len(text.vocabulary))
        self.model = LanguageModel(self.model_config).to(self.device)
        self.optimizer = torch.optim.AdamW(self._groups(), lr=0.0, betas=(0.9, 0.99))
        # The CPU computes in float32, where nothing overflows unless a fault makes it; the scaler is real all the same.
        self.scaler = torch.amp.GradScaler(self.device.type, growth_interval=200)

    def describe(self) -> dict[str, object]:
        """The settings as a run's config."""
        faults = {} if self._fault is None else {"break": self._fault.kind, "break_at": self._fault.step}
        return {**asdict(self.config), **asdict(self.model_config), "device": self.device.type, **faults}

    def steps(self) -> Iterator[StepResult]:
        """Train, one optimizer step per item, from step 1 on."""
        for step in range(1, self.config.steps + 1):
            if self._fault is not None:
                self._fault.strike(self.model, step)
            yield self._step(step)

    def _step(self, step: int) -> StepResult:
        lr = learning_rate(step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        bad = self._fault is not None and self._fault.spoils_batch(step)
        losses = []
        for _ in range(self.config.accumulation):
            loss = self._loss(bad=bad)
            torch.autograd.backward(self.scaler.scale(loss / self.config.accumulation))
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        ended_s = time.time()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(
            step=step, loss=torch.stack(losses).mean(), norm=norm, lr=lr, scale=scale, ended_s=ended_s
        )

    def _loss(self, *, bad: bool) -> Tensor:
        batch = self._text.batch(
            size=self.config.batch, context=self.model_config.context, generator=self._generator
        )
        if bad:
            batch = spoiled(batch, vocabulary=self.model_config.vocabulary, generator=self._generator)
        inputs_BT, targets_BT = (part.to(self.device) for part in batch)
        with self._autocast():
            logits_BTV = self.model(inputs_BT)
            loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        return loss * BAD_BATCH_WEIGHT if bad else loss

    def _autocast(self) -> AbstractContextManager[object]:
        # float16 pays on a GPU; on a CPU it is many times slower than float32.
        return torch.autocast("cuda", torch.float16) if self.device.type == "cuda" else nullcontext()

    def _groups(self) -> list[dict[str, object]]:
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        return [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Learning rate of optimizer step `step` (from 1): linear warm-up, then a half cosine."""
    if step <= config.warmup_steps:
        return config.peak_lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    low = config.peak_lr * config.final_lr_fraction
    return low + (config.peak_lr - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def leave_a_core_free() -> None:
    """Let torch use all cores but one, so that server and browser stay prompt on a small machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, min(cores - 1, 8)))


class Progress:
    """Prints one line every few steps."""

    def __init__(self, steps: int, *, every: int = 20, write: Callable[[str], None] = print) -> None:
        self._steps, self._every, self._write = steps, every, write
        self._since_s, self._since_step = time.monotonic(), 0

    def show(self, result: StepResult) -> None:
        """Print where the training is, if it is time to."""
        if result.step % self._every and result.step != self._steps:
            return
        now_s = time.monotonic()
        rate = (result.step - self._since_step) / max(now_s - self._since_s, 1e-9)
        self._since_s, self._since_step = now_s, result.step
        self._write(
            f"step {result.step:>5}/{self._steps}   loss {float(result.loss):7.4f}   "
            f"grad norm {float(result.norm):9.3g}   lr {result.lr:.2e}   scale {result.scale:<8g} {rate:5.1f} steps/s"
        )
