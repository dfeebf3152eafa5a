"""transformers' Trainer within a memory budget, on texts of varying length.

Run `python examples/trainer.py --memory-budget 16MiB`.
"""

import argparse
import random
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from mimose.integrations.huggingface import enable

CUDA = torch.cuda.is_available()


def padded(rows: list[dict]) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def text(longest: int) -> dict:
    length = random.randint(longest // 8, longest)
    return {"input_ids": torch.randint(1, 1000, (length,)), "labels": random.randint(0, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-budget", default="6GiB" if CUDA else "16MiB")
    parser.add_argument("--steps", type=int, default=200 if CUDA else 12)
    parser.add_argument("--output-dir", default=tempfile.mkdtemp())
    options = parser.parse_args()

    random.seed(0)
    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = BertConfig(**({} if CUDA else {**small, "intermediate_size": 128, "vocab_size": 1000}))
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            options.output_dir,
            max_steps=options.steps,
            per_device_train_batch_size=32 if CUDA else 4,
            logging_steps=options.steps // 4,
            report_to="none",
        ),
        train_dataset=[text(512 if CUDA else 128) for _ in range(1000)],
        data_collator=padded,
    )

    enabled = enable(trainer, memory_budget=options.memory_budget)  # the one line that matters

    trainer.train()
    print(enabled.stats())


if __name__ == "__main__":
    main()
