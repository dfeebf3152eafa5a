"""Small trainings through transformers' trainers, and what they have in common."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rise import budget_for, rise_of
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import loops
from mimose.integrations.huggingface import Enabled, enable

Row = dict[str, Any]


def sentences(count: int, low: int = 20, high: int = 160, seed: int = 0) -> list[Row]:
    """Token lists of varying length, each with a class."""
    dice = random.Random(seed)
    return [
        {
            "input_ids": [dice.randrange(5, 50) for _ in range(dice.randint(low, high))],
            "labels": dice.randrange(2),
        }
        for _ in range(count)
    ]


def padded(rows: list[Row]) -> dict[str, torch.Tensor]:
    """A batch, padded to its longest."""
    texts = [torch.tensor(row["input_ids"]) for row in rows]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def bert(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
    )
    return BertForSequenceClassification(config)


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "max_steps": 12,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }


def trainer_of(
    model: nn.Module | None = None, own: dict[str, Any] | None = None, **changes: Any
) -> Trainer:
    """A trainer that is the same each time: weights, batches, dropout."""
    return Trainer(
        model=model or bert(),
        args=TrainingArguments(**arguments(**changes)),
        train_dataset=sentences(64),
        eval_dataset=sentences(8, seed=1),
        data_collator=padded,
        **(own or {}),
    )


def losses(trainer: Trainer) -> list[float]:
    return logged(trainer, "loss")


def logged(trainer: Trainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def places(model: nn.Module) -> list[dict[str, Any]]:
    """What is in every module, less the mark that Accelerate leaves."""
    found = loops.places(model)
    for place in found:
        place.pop("_is_accelerate_prepared", None)
    return found


@dataclass(frozen=True)
class Rise:
    """How far a plain training goes above what was in use before it."""

    trainer: Trainer
    rise_bytes: int

    def budget(self, share: float) -> int:
        """What is in use now, and that share of the rise."""
        return budget_for(self.rise_bytes, share)


def measured(trainer: Trainer) -> Rise:
    return Rise(trainer, rise_of(trainer.train))


@dataclass(frozen=True)
class Twins:
    """The same training twice: plain, and with mimose under a budget that plain exceeds."""

    plain: Trainer
    ours: Trainer
    enabled: Enabled

    def assert_same(self) -> None:
        """Bit for bit."""
        assert losses(self.plain)
        assert losses(self.ours) == losses(self.plain)
        both = zip(self.ours.model.parameters(), self.plain.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in both)

    def assert_planned(self, steps: int = 4) -> None:
        """And not all kept, nor all recomputed, nor the same for every batch; within the budget."""
        stats = self.enabled.stats()
        assert stats.planned_steps >= steps
        assert stats.runs_kept
        assert stats.runs_recomputed
        assert len(set(logged(self.ours, "mimose/blocks_recomputed"))) > 1
        assert stats.peak_bytes <= (stats.budget_bytes or 0)


def twins(make: Callable[[], Trainer], share: float = 0.6, **options: Any) -> Twins:
    plain = measured(make())
    ours = make()
    enabled = enable(ours, plain.budget(share), **options)
    ours.train()
    return Twins(plain.trainer, ours, enabled)
