"""Hugging Face Trainer: one callback, and a tiny GPT-2 that learns to count. Needs `pip install "transformers[torch]"`."""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradiometer.integrations.transformers import GradiometerCallback

VOCABULARY, LENGTH = 64, 32


def sentences(count: int) -> list[dict[str, torch.Tensor]]:
    """Each counts up from a random number."""
    rows = (torch.randint(0, VOCABULARY, (count, 1)) + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=100,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            eval_strategy="steps",
            eval_steps=50,
            save_strategy="no",
            report_to=[],
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=sentences(512),
            eval_dataset=sentences(32),
            callbacks=[GradiometerCallback(project="examples", name="huggingface_trainer")],
        )
        trainer.train()


if __name__ == "__main__":
    main()
